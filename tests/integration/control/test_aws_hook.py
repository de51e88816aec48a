"""EC2's notices by way of SNS: who may send them, and what they set in motion. Streams of notices end there too."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from app.api import sns
from providers.base import Notice, Transient
from providers.ec2.events import notice as ec2_event
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import FakeClock, World

TOPIC = "arn:aws:sns:us-east-2:123456789012:spot"
CERTIFICATE = "https://sns.us-east-2.amazonaws.com/SimpleNotificationService-0f.pem"
SUBSCRIBE = "https://sns.us-east-2.amazonaws.com/?Action=ConfirmSubscription&Token=secret"
WARNING, REBALANCE = "EC2 Spot Instance Interruption Warning", "EC2 Instance Rebalance Recommendation"
Open = Callable[..., AbstractAsyncContextManager[World]]


class Amazon:
    """Signs like SNS, and serves what SNS serves."""

    def __init__(self, now: float) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.now = now
        self.fetched: list[str] = []
        self.down = False

    def certificate(self, days: int = 30) -> bytes:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sns.amazonaws.com")])
        at = datetime.fromtimestamp(self.now, UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(1)
            .not_valid_before(at - timedelta(days=60))
            .not_valid_after(at + timedelta(days=days))
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    async def fetch(self, url: str) -> bytes:
        self.fetched.append(url)
        if self.down:
            raise httpx.ConnectTimeout("no route")
        return self.certificate() if url.endswith(".pem") else b"<ConfirmSubscriptionResponse/>"

    def message(self, body: str = "{}", *, version: str = "1", **changes: Any) -> dict[str, Any]:
        """A signed message; `changes` are signed too."""
        message: dict[str, Any] = {
            "Type": "Notification",
            "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
            "TopicArn": TOPIC,
            "Message": body,
            "Timestamp": datetime.fromtimestamp(self.now, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "SignatureVersion": version,
            "SigningCertURL": CERTIFICATE,
            "UnsubscribeURL": "https://sns.us-east-2.amazonaws.com/?Action=Unsubscribe",
            **changes,
        }
        names = ["Message", "MessageId", "SubscribeURL", "Subject", "Timestamp", "Token", "TopicArn", "Type"]
        text = "".join(f"{name}\n{message[name]}\n" for name in names if name in message)
        algorithm = hashes.SHA1() if version == "1" else hashes.SHA256()
        signature = self.key.sign(text.encode(), padding.PKCS1v15(), algorithm)
        return {**message, "Signature": base64.b64encode(signature).decode()}

    def confirmation(self, **changes: Any) -> dict[str, Any]:
        values = {"Type": "SubscriptionConfirmation", "Token": "secret", "SubscribeURL": SUBSCRIBE}
        return self.message("You have chosen to subscribe …", **{**values, **changes})

    def event(self, kind: str, instance_id: str, **changes: Any) -> dict[str, Any]:
        at = datetime.fromtimestamp(self.now, UTC).isoformat().replace("+00:00", "Z")
        detail = {"instance-id": instance_id, "instance-action": "terminate"}
        return self.message(
            json.dumps({"detail-type": kind, "source": "aws.ec2", "time": at, "detail": detail}), **changes
        )


@pytest.fixture
async def control(open_world: Open) -> AsyncIterator[World]:
    async with open_world(aws_topic_arns=[TOPIC]) as made:
        yield made


@pytest.fixture
def amazon(control: World) -> Amazon:
    made = Amazon(control.clock())
    control.svc.sns = sns.Verifier(made.fetch)
    control.svc.read_aws_event = partial(ec2_event, provider="marketplace")
    return made


async def post(control: World, message: Any) -> httpx.Response:
    content = message if isinstance(message, bytes) else json.dumps(message).encode()
    headers = {"content-type": "text/plain; charset=UTF-8", "authorization": ""}
    answer = await control.http.post("/v1/hooks/aws", content=content, headers=headers)
    await control.svc.controller.leases.drain_tasks()
    return answer


@pytest.mark.parametrize("version", ["1", "2"])
async def test_an_interrupted_node_drains_and_its_replacement_is_rented_at_once(
    control: World, provider: FakeProvider, amazon: Amazon, version: str
) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    assert provider.live_machines() == ["m1"]
    message = amazon.event(WARNING, provider.live()[0].instance_id, version=version)
    answer = await post(control, message)
    assert (answer.status_code, answer.json()) == (202, {"accepted": True, "replay": False, "acted": True})
    assert provider.live_machines() == ["m1", "m2"]
    row = await control.node_row(node.id)
    assert (row.state, row.drain) == ("draining", True)
    kinds = await control.kinds(job_id)
    assert kinds.count("interruption_notice") == 1
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["preemptions"] == 1
    again = await post(control, message)
    assert again.json() == {"accepted": True, "replay": True, "acted": False}
    # Told anew, under another id, by the second of two rules: nothing more to do.
    other = await post(control, amazon.event(WARNING, provider.live()[0].instance_id, MessageId="another"))
    assert other.json()["acted"] is False
    assert (await control.kinds(job_id)).count("interruption_notice") == 1
    assert provider.live_machines() == ["m1", "m2"]
    provider.fail(next(r.instance_id for r in provider.live() if r.machine.machine_id == "m1"))
    await control.round(10)
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["preemptions"] == 1
    assert amazon.fetched == [CERTIFICATE], "the certificate is fetched once"


async def test_a_machine_that_is_interrupted_while_it_boots_is_given_back(
    control: World, provider: FakeProvider, amazon: Amazon
) -> None:
    provider.boot_s = 300
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    assert provider.live_machines() == ["m1"]
    assert (await post(control, amazon.event(WARNING, provider.live()[0].instance_id))).json()["acted"] is True
    await control.round(5)
    assert provider.live_machines() == ["m2"]


async def test_an_endangered_node_gives_way_to_one_that_costs_little_more(
    control: World, provider: FakeProvider, amazon: Amazon
) -> None:
    provider.machines[1].price_micros_h = 210_000
    job_id = await control.create()
    await control.running(job_id)
    answer = await post(control, amazon.event(REBALANCE, provider.live()[0].instance_id))
    assert answer.json()["acted"] is True
    assert provider.live_machines() == ["m1", "m2"], "the old one stays until the new one works"
    fresh = next(r for r in provider.live() if r.machine.machine_id == "m2")
    await control.join(fresh)
    await control.round(1)
    (old, new) = await control.leases()
    assert (await control.kinds(job_id)).count("rebalance_notice") == 1
    assert old.retire_after == [new.id]
    assert "node_draining" in await control.kinds(job_id)


async def test_an_endangered_node_without_a_good_alternative_stays(
    control: World, provider: FakeProvider, amazon: Amazon
) -> None:
    job_id = await control.create()
    _, players = await control.running(job_id)
    await post(control, amazon.event(REBALANCE, provider.live()[0].instance_id))
    await control.rounds(3, 10, *players)
    assert provider.live_machines() == ["m1"]
    assert provider.bids == []
    (lease,) = await control.leases()
    assert lease.endangered_since is not None


async def test_other_events_and_other_people_s_instances_change_nothing(
    control: World, provider: FakeProvider, amazon: Amazon
) -> None:
    job_id = await control.create()
    await control.running(job_id)
    before = await control.kinds(job_id)
    events = [
        amazon.event(WARNING, "i-of-somebody", MessageId="a"),
        amazon.event("EC2 Instance State", "1", MessageId="b"),
    ]
    for message in events:
        answer = await post(control, message)
        assert (answer.status_code, answer.json()["acted"]) == (202, False)
    assert await control.kinds(job_id) == before
    assert provider.live_machines() == ["m1"]


def spoilt(amazon: Amazon) -> list[tuple[str, Any, int]]:
    good = amazon.event(WARNING, "1")
    evil = "https://sns.us-east-2.amazonaws.com.evil.example/x.pem"
    hosts = [
        evil, "http://sns.us-east-2.amazonaws.com/x.pem", "https://evil.example/sns.us-east-2.amazonaws.com",
        "https://sns.us-east-2.amazonaws.com:8443/x.pem", "https://sns.us-east-2.amazonaws.com@evil.example/x.pem",
        "https://u:p@sns.us-east-2.amazonaws.com/x.pem", "https://s3.amazonaws.com/x.pem",
        "https://sns.evil-1.example.com/x.pem", "https://[", "https://sns.us-east-2.amazonaws.com\\@evil.example/x.pem",
    ]  # fmt: skip
    old = (datetime.fromtimestamp(amazon.now, UTC) - timedelta(hours=2)).isoformat().replace("+00:00", "Z")
    stranger = Amazon(amazon.now)
    return [
        ("another message", {**good, "Message": good["Message"].replace('"1"', '"2"')}, 401),
        ("another id", {**good, "MessageId": "fresh"}, 401),
        ("a field that was not signed", {**good, "Subject": "added"}, 401),
        ("not base64", {**good, "Signature": "%%%"}, 401),
        ("another version", {**good, "SignatureVersion": "2"}, 401),
        ("an unknown version", {**good, "SignatureVersion": "3"}, 400),
        ("another's key", stranger.event(WARNING, "1"), 401),
        *((f"host {url}", amazon.event(WARNING, "1", SigningCertURL=url), 401) for url in hosts),
        ("another topic", amazon.event(WARNING, "1", TopicArn=TOPIC + "2"), 403),
        ("an old one", amazon.event(WARNING, "1", Timestamp=old), 400),
        ("no time", amazon.event(WARNING, "1", Timestamp="soon"), 400),
        ("no event", amazon.message("[]"), 422),
        ("no JSON inside", amazon.message("hello"), 422),
        ("no message", {"Type": "Notification"}, 400),
        ("raw delivery", json.loads(good["Message"]), 400),
        ("no JSON", b"\xff", 400),
        ("deep", b"[" * 100_000, 400),
        ("large", b"x" * (256 * 1024 + 1), 413),
    ]


async def test_a_message_that_cannot_be_trusted_changes_nothing(
    control: World, provider: FakeProvider, amazon: Amazon
) -> None:
    job_id = await control.create()
    await control.running(job_id)
    for what, message, status in spoilt(amazon):
        answer = await post(control, message)
        assert answer.status_code == status, (what, answer.text)
    assert set(amazon.fetched) == {CERTIFICATE}
    assert "interruption_notice" not in await control.kinds(job_id)
    # None of these used up the id.
    good = amazon.event(WARNING, provider.live()[0].instance_id)
    assert (await post(control, good)).json() == {"accepted": True, "replay": False, "acted": True}


async def test_a_certificate_that_is_over_proves_nothing(control: World, amazon: Amazon) -> None:
    message = amazon.event(WARNING, "1")
    old = amazon.certificate(days=-1)

    async def fetch(url: str) -> bytes:
        return old

    control.svc.sns = sns.Verifier(fetch)
    assert (await post(control, message)).status_code == 401


async def test_without_the_certificate_sns_is_asked_to_come_again(control: World, amazon: Amazon) -> None:
    amazon.down = True
    answer = await post(control, amazon.event(WARNING, "1"))
    assert answer.status_code == 503
    assert "secret" not in answer.text
    amazon.down = False
    assert (await post(control, amazon.event(WARNING, "1"))).json()["replay"] is False


async def test_a_subscription_is_confirmed_for_our_topic_at_sns_only(control: World, amazon: Amazon) -> None:
    answer = await post(control, amazon.confirmation())
    assert (answer.status_code, answer.json()["confirmed"]) == (202, True)
    assert amazon.fetched == [CERTIFICATE, SUBSCRIBE]
    for changes, status in (
        ({"TopicArn": TOPIC + "2"}, 403),
        ({"SubscribeURL": "https://evil.example/?x"}, 401),
        ({"SubscribeURL": "http://169.254.169.254/"}, 401),
    ):
        assert (await post(control, amazon.confirmation(**changes))).status_code == status
    assert amazon.fetched == [CERTIFICATE, SUBSCRIBE]
    amazon.down = True
    failed = await post(control, amazon.confirmation())
    assert failed.status_code == 503
    assert "secret" not in failed.text


async def test_without_topics_in_the_settings_nothing_is_taken(open_world: Open) -> None:
    async with open_world() as world:
        assert (await post(world, Amazon(world.clock()).event(WARNING, "1"))).status_code == 503


class Streaming(FakeProvider):
    """A provider that tells notices, and whose stream breaks."""

    told: list[Notice | Exception]

    async def _tell(self) -> AsyncIterator[Notice]:
        while self.told:
            one = self.told.pop(0)
            if isinstance(one, Exception):
                raise one
            yield one

    def notices(self) -> AsyncIterator[Notice]:
        return self._tell()


async def test_a_provider_s_own_stream_ends_in_the_same_place(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.running(job_id)
    stream = Streaming(control.clock, [])
    stream.told = [Notice("marketplace", provider.live()[0].instance_id, "interruption", None), Transient("broke")]
    with pytest.raises(Transient):
        await control.svc.notices.listen_once(stream)
    await control.svc.controller.leases.drain_tasks()
    assert provider.live_machines() == ["m1", "m2"]
    assert await control.svc.notices.listen_once(stream) == 0
    assert "interruption_notice" in await control.kinds(job_id)


async def test_a_stream_that_breaks_off_by_a_defect_is_opened_again(
    open_world: Open, clock: FakeClock, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.notices.FIRST_WAIT_S", 0.01)
    stream = Streaming(clock, [], name="cloud")
    async with open_world(others=[stream]) as control:
        job_id = await control.create()
        await control.running(job_id)
        warning = Notice("marketplace", provider.live()[0].instance_id, "interruption", None)
        stream.told = [ZeroDivisionError("a defect"), Transient("broke"), warning]
        news = control.svc.core.signals.subscribe(f"job:{job_id}")
        control.svc.notices.start()
        async with asyncio.timeout(10):
            await news.wait()
        assert "interruption_notice" in await control.kinds(job_id)
