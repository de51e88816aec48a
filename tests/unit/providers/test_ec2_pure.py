"""EC2: what is sent, and what errors, prices, states and events mean."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.estimates import find_gpu
from providers import base
from providers.base import BadRequest, Billing, CapabilityError, MalformedAnswer, Offer, Phase, RentSpec
from providers.ec2 import Ec2Config, events
from providers.ec2.config import load_types
from providers.ec2.errors import classify, leaves_nothing
from providers.ec2.parse import Unreadable, instance, micros, newest_prices, offer, passes, phase_of
from providers.ec2.payload import client_token, create_request, user_data

CONFIG = Ec2Config("us-east-1", "ami-1", access_key_id="AKIAX", secret_access_key="s3cret-key")
TYPES = load_types(CONFIG)
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
OFFER: Offer = offer(("g5.xlarge", "us-east-1a"), 431_000, TYPES["g5.xlarge"], CONFIG, "ec2", NOW)
SPEC = RentSpec("echo2:f:l:1", "img", "exec echo2 agent", {"ECHO2_JOIN_TOKEN": "j0in"}, 30.0, (7070,))


def failure(code: str, status: int = 400, message: str = "no") -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "RunInstances",
    )


@pytest.mark.parametrize(
    ("error", "kind", "nothing"),
    [
        (failure("InsufficientInstanceCapacity", 500), base.NoCapacity, True),
        (failure("UnfulfillableCapacity", 500), base.NoCapacity, True),
        (failure("Unsupported"), base.NoCapacity, True),
        (failure("SpotMaxPriceTooLow"), base.BidTooLow, True),
        (failure("MaxSpotInstanceCountExceeded"), base.QuotaError, True),
        (failure("VcpuLimitExceeded"), base.QuotaError, True),
        (failure("UnauthorizedOperation", 403), base.AuthError, True),
        (failure("AuthFailure", 401), base.AuthError, True),
        (failure("RequestLimitExceeded", 503), base.RateLimited, True),
        (failure("InvalidAMIID.NotFound"), base.BadRequest, True),
        (failure("InvalidInstanceID.NotFound"), base.InstanceNotFound, True),
        (failure("SomethingNew", 400), base.BadRequest, True),
        (failure("IdempotentParameterMismatch"), base.BadRequest, False),
        (failure("InternalError", 500), base.Transient, False),
        (failure("SomethingNew", 503), base.Transient, False),
        (failure("", 0), base.Transient, False),
        (NoCredentialsError(), base.AuthError, True),
        (EndpointConnectionError(endpoint_url="https://e"), base.Transient, True),
        (ConnectTimeoutError(endpoint_url="https://e"), base.Transient, True),
        (ReadTimeoutError(endpoint_url="https://e"), base.Transient, False),
        (ConnectionClosedError(endpoint_url="https://e"), base.Transient, False),
        (ResponseParserError("not XML"), base.MalformedAnswer, False),
    ],
)
def test_what_an_error_means_and_whether_it_proves_that_nothing_was_made(
    error: Exception, kind: type[base.ProviderError], nothing: bool
) -> None:
    found = classify("create", error, provider="ec2")
    assert type(found) is kind
    assert leaves_nothing(error) is nothing
    if isinstance(found, base.RateLimited):
        assert found.wait_s > 0


def test_quota_and_capacity_send_the_caller_to_another_pool_and_a_bad_key_nowhere() -> None:
    def retry(code: str) -> base.Retry:
        return classify("create", failure(code), provider="ec2").retry

    assert retry("VcpuLimitExceeded") is base.Retry.NEXT_POOL
    assert retry("InsufficientInstanceCapacity") is base.Retry.NEXT_POOL
    assert retry("AuthFailure") is base.Retry.NEVER
    assert retry("RequestLimitExceeded") is base.Retry.BACKOFF


def test_no_key_stays_in_an_error() -> None:
    text = "canonical: x-amz-security-token:FQoGZX//tok s3cret-key AKIAX"
    found = classify("list", failure("SignatureDoesNotMatch", 403, text), provider="ec2", secrets=CONFIG.secrets())
    for secret in ("s3cret-key", "AKIAX", "FQoGZX"):
        assert secret not in f"{found} {found.raw}"
    assert "s3cret-key" not in repr(CONFIG)


# what is sent


def test_a_create_is_one_tagged_one_time_spot_instance_without_a_maximum_price() -> None:
    config = replace(
        CONFIG, subnets={"us-east-1a": "subnet-1"}, security_group_ids=("sg-1",), key_name="k", instance_profile="p"
    )
    sent = create_request(OFFER, SPEC, config)
    assert (sent["InstanceType"], sent["Placement"]) == ("g5.xlarge", {"AvailabilityZone": "us-east-1a"})
    assert (sent["MinCount"], sent["MaxCount"], sent["ImageId"]) == (1, 1, "ami-1")
    spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    assert sent["InstanceMarketOptions"] == {"MarketType": "spot", "SpotOptions": spot}
    assert sent["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert [t["ResourceType"] for t in sent["TagSpecifications"]] == ["instance", "volume", "spot-instances-request"]
    for tags in sent["TagSpecifications"]:
        assert {"Key": "Name", "Value": SPEC.label} in tags["Tags"]
        assert {"Key": "echo2:label", "Value": SPEC.label} in tags["Tags"]
    assert "j0in" not in json.dumps(sent["TagSpecifications"])
    assert sent["BlockDeviceMappings"][0]["Ebs"] == {
        "VolumeSize": 30, "VolumeType": "gp3", "DeleteOnTermination": True,
    }  # fmt: skip
    (card,) = sent["NetworkInterfaces"]
    assert (card["SubnetId"], card["Groups"], card["AssociatePublicIpAddress"]) == ("subnet-1", ["sg-1"], True)
    assert (sent["KeyName"], sent["IamInstanceProfile"]) == ("k", {"Name": "p"})
    assert sent == create_request(OFFER, SPEC, config)


def test_without_settings_nothing_optional_is_sent() -> None:
    sent = create_request(OFFER, SPEC, CONFIG)
    assert not {"KeyName", "IamInstanceProfile", "NetworkInterfaces", "SecurityGroupIds", "SubnetId"} & set(sent)
    groups = create_request(OFFER, SPEC, replace(CONFIG, security_group_ids=("sg-1",)))
    assert groups["SecurityGroupIds"] == ["sg-1"]


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_tokens_fit_and_tell_intents_apart(one: str, other: str) -> None:
    assert len(client_token(one)) <= 64
    assert (client_token(one) == client_token(other)) is (one == other)


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))
def test_a_value_reaches_the_machine_as_it_is(value: str) -> None:
    script = user_data(replace(SPEC, env={"A": value}))
    start = script.index("export A=")
    assert shlex.split(script[start : script.index("\nbash -c ", start)])[1] == f"A={value}"


def test_the_machine_is_told_to_ask_for_notices_unless_the_order_says_otherwise() -> None:
    assert "export ECHO2_NOTICES=ec2\n" in user_data(SPEC)
    assert "export ECHO2_NOTICES=''\n" in user_data(replace(SPEC, env={"ECHO2_NOTICES": ""}))


def test_the_script_runs_onstart_with_its_environment_and_shuts_down_whatever_comes_of_it(tmp_path: Path) -> None:
    shutdown = tmp_path / "shutdown"
    shutdown.write_text(f"#!/bin/bash\necho $* > {tmp_path}/down\n")
    shutdown.chmod(0o755)
    onstart = 'set -eu\nprintf \'%s\' "$A" > "$OUT"\nexit 3'
    spec = replace(SPEC, onstart=onstart, env={"A": 'it\'s $HOME `x` "q"\n', "OUT": str(tmp_path / "out")})
    script = user_data(spec).replace("/root", str(tmp_path)).replace("/var/log/echo2.log /dev/console", "/dev/null")
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=30
    )
    assert (tmp_path / "out").read_text() == spec.env["A"]
    assert (tmp_path / "down").read_text().split() == ["-h", "now"]
    assert "status 3" in done.stdout


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"bid_micros_h": 1}, BadRequest, "bid_micros_h"),
        ({"env": {"A B": "x"}}, BadRequest, "A B"),
        ({"env": {"A": "x\0"}}, BadRequest, "NUL"),
        ({"label": ""}, BadRequest, "label"),
        ({"label": "x" * 257}, BadRequest, "label"),
        ({"onstart": "x" * 17_000}, BadRequest, "user data"),
        ({"disk_gb": 0.0}, BadRequest, "disk_gb"),
        ({"ports": tuple(range(10_000, 10_065))}, BadRequest, "ports"),
        ({"ports": tuple(range(10_000, 10_050))}, BadRequest, "ports"),
    ],
)
def test_what_ec2_would_refuse_or_misread_is_not_sent(change: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_request(OFFER, replace(SPEC, **change), CONFIG)


def test_other_billing_another_zone_and_strange_offers_are_not_sent() -> None:
    with pytest.raises(CapabilityError):
        create_request(replace(OFFER, billing=Billing.ON_DEMAND), SPEC, CONFIG)
    with pytest.raises(BadRequest, match="subnet"):
        create_request(OFFER, SPEC, replace(CONFIG, subnets={"us-east-1b": "subnet-2"}))
    with pytest.raises(BadRequest, match="TYPE/ZONE"):
        create_request(replace(OFFER, offer_id="7000001"), SPEC, CONFIG)


# what comes back


def price(value: Any = "0.4310", hours: float = 0, **change: Any) -> dict[str, Any]:
    row = {"InstanceType": "g5.xlarge", "AvailabilityZone": "us-east-1a", "ProductDescription": "Linux/UNIX"}
    return {**row, "SpotPrice": value, "Timestamp": NOW - timedelta(hours=hours), **change}


def test_the_newest_price_of_each_type_and_zone_counts() -> None:
    rows = [
        price("9.0", 5), price("0.4310", 1), price("7.0", 3), price("0.5", AvailabilityZone="us-east-1b"),
        price("0.1", ProductDescription="Windows"), price("0.1", InstanceType="m5.large"), price("free", -9), {},
    ]  # fmt: skip
    found = newest_prices(rows, TYPES, "Linux/UNIX")
    assert found == {("g5.xlarge", "us-east-1a"): 431_000, ("g5.xlarge", "us-east-1b"): 500_000}
    assert newest_prices([], TYPES, "Linux/UNIX") == {}


def test_prices_none_of_which_can_be_read_are_not_no_prices() -> None:
    with pytest.raises(Unreadable):
        newest_prices([price("free"), price(None), price(Timestamp="now"), "x"], TYPES, "Linux/UNIX")
    for bad in ("0", "-1", "NaN", "inf", "", None):
        with pytest.raises(Unreadable):
            micros(bad)
    assert (micros("1.2345"), micros("0.0000001")) == (1_234_500, 1)


def test_an_offer_holds_the_address_the_disk_and_the_traffic_and_the_link_to_the_internet() -> None:
    assert (OFFER.compute_micros_h, OFFER.disk_micros_gb_month) == (436_000, 80_000)
    assert (OFFER.upload_micros_gb, OFFER.download_micros_gb) == (90_000, 0)
    assert (OFFER.machine_id, OFFER.region, OFFER.gpu_name) == ("g5.xlarge/us-east-1a", "us-east-1a", "A10G")
    assert TYPES["g5.xlarge"].internet_mbps == 2500
    assert TYPES["g6e.4xlarge"].internet_mbps == 5000
    assert TYPES["p5.48xlarge"].internet_mbps == 50_000
    private = offer(("g5.xlarge", "z"), 431_000, TYPES["g5.xlarge"], replace(CONFIG, public_ip=False), "ec2", NOW)
    assert (private.compute_micros_h, private.ports) == (431_000, 0)


def test_filters() -> None:
    query = base.OfferQuery(Billing.SPOT_MARKET)
    assert passes(OFFER, query, CONFIG)
    assert passes(OFFER, replace(query, gpu_names=("a10g",), min_reliability=0.9, min_ports=1), CONFIG)
    for change in ({"gpu_names": ("A10",)}, {"max_compute_micros_h": 435_999}, {"min_ports": 65}):
        assert not passes(OFFER, replace(query, **change), CONFIG)
    assert not passes(OFFER, replace(query, min_reliability=0.96), CONFIG)
    assert not passes(OFFER, query, replace(CONFIG, subnets={"us-east-1b": "subnet"}))


@pytest.mark.parametrize(
    ("state", "reason", "phase"),
    [
        ("pending", "", Phase.PENDING),
        ("running", "", Phase.RUNNING),
        ("stopping", "Server.SpotInstanceShutdown", Phase.PAUSED),
        ("stopped", "Client.UserInitiatedShutdown", Phase.PAUSED),
        ("shutting-down", "Client.UserInitiatedShutdown", Phase.TERMINATING),
        ("shutting-down", "", Phase.TERMINATING),
        ("shutting-down", "Server.SpotInstanceTermination", Phase.FAILED),
        ("shutting-down", "Client.InstanceInitiatedShutdown", Phase.FAILED),
        ("terminated", "Server.InsufficientInstanceCapacity", Phase.FAILED),
        ("terminated", "Client.VolumeLimitExceeded", Phase.FAILED),
        ("dreaming", "", Phase.UNKNOWN),
    ],
)
def test_phases(state: str, reason: str, phase: Phase) -> None:
    assert phase_of(state, reason) is phase


ROW: dict[str, Any] = {
    "InstanceId": "i-1", "InstanceType": "g5.xlarge", "InstanceLifecycle": "spot", "State": {"Name": "running"},
    "Placement": {"AvailabilityZone": "us-east-1a"}, "LaunchTime": NOW, "PublicIpAddress": "203.0.113.9",
    "Tags": [{"Key": "echo2:label", "Value": "L"}, {"Key": "echo2:ports", "Value": "7070 8000"}],
}  # fmt: skip


def test_an_instance() -> None:
    found = instance(ROW, TYPES, {("g5.xlarge", "us-east-1a"): 436_000}, "ec2")
    assert (found.instance_id, found.label, found.phase, found.billing) == (
        "i-1", "L", Phase.RUNNING, Billing.SPOT_MARKET,
    )  # fmt: skip
    assert (found.compute_micros_h, found.machine_id, found.gpu_name) == (436_000, "g5.xlarge/us-east-1a", "A10G")
    assert (found.started_at, found.public_host, found.ports) == (NOW, "203.0.113.9", {7070: 7070, 8000: 8000})
    taken = {"Code": "Server.SpotInstanceTermination", "Message": "taken away"}
    ended = instance({**ROW, "State": {"Name": "shutting-down"}, "StateReason": taken}, TYPES, {}, "ec2")
    assert (ended.phase, ended.compute_micros_h) == (Phase.FAILED, None)
    assert ended.detail == "Server.SpotInstanceTermination: taken away"
    bare = instance({"InstanceId": "i-2", "State": {"Name": "pending"}}, TYPES, {}, "ec2")
    assert (bare.label, bare.billing, bare.started_at, bare.ports) == ("", Billing.ON_DEMAND, None, {})


@pytest.mark.parametrize("row", [None, {}, {"InstanceId": "i-1"}, {"State": {"Name": "running"}}, {"State": None}])
def test_an_instance_without_id_or_state_can_t_be_read(row: Any) -> None:
    with pytest.raises(MalformedAnswer):
        instance(row, TYPES, {}, "ec2")


# the table and the settings


def test_the_table_uses_the_names_that_prices_are_compared_by() -> None:
    unknown = {t.gpu_name for t in TYPES.values() if find_gpu(t.gpu_name) is None}
    assert unknown <= {"A10G", "B200", "RTX PRO 6000 S"}
    assert {"g5.xlarge", "g6.xlarge", "g6e.xlarge", "p4d.24xlarge", "p5.48xlarge"} <= set(TYPES)
    assert all(t.num_gpus >= 1 and t.gpu_ram_mb >= 16_000 and t.network_gbit_s > 0 for t in TYPES.values())


def test_settings_that_can_t_work_are_refused(tmp_path: Path) -> None:
    assert set(load_types(replace(CONFIG, instance_types=("p5.48xlarge",)))) == {"p5.48xlarge"}
    with pytest.raises(BadRequest, match=r"g99\.xlarge"):
        load_types(replace(CONFIG, instance_types=("g99.xlarge",)))
    bad = tmp_path / "types.toml"
    bad.write_text('["g5.xlarge"]\ngpu_name = "A10G"\n')
    for path in (bad, tmp_path / "none.toml"):
        with pytest.raises(BadRequest, match="instance types"):
            load_types(replace(CONFIG, types_file=path))
    for change in ({"region": ""}, {"reliability": 2.0}, {"ebs_micros_gb_month": -1}, {"secret_access_key": None}):
        with pytest.raises(BadRequest):
            replace(CONFIG, **change)


# notices


def event(kind: str = "EC2 Spot Instance Interruption Warning", instance_id: str | None = "i-1234567890abcdef0") -> str:
    return json.dumps({
        "version": "0", "id": "1", "detail-type": kind, "source": "aws.ec2", "account": "123456789012",
        "time": "2026-06-01T12:00:00Z", "region": "us-east-2",
        "resources": ["arn:aws:ec2:us-east-2a:instance/i-1234567890abcdef0"],
        "detail": {"instance-id": instance_id, "instance-action": "terminate"},
    })  # fmt: skip


def test_events_are_notices() -> None:
    warned = events.notice(event(), "ec2")
    assert warned is not None
    assert (warned.instance_id, warned.kind) == ("i-1234567890abcdef0", "interruption")
    assert warned.at == NOW + timedelta(minutes=2)
    advised = events.notice(event("EC2 Instance Rebalance Recommendation"), "ec2")
    assert advised is not None
    assert (advised.kind, advised.at) == ("rebalance", None)
    assert events.notice(event("EC2 Instance State-change Notification"), "ec2") is None


@pytest.mark.parametrize("body", ["", "x", "[]", "{}", '{"detail": 1}', event(instance_id=None)])
def test_what_is_no_event_is_told_apart(body: str) -> None:
    with pytest.raises(ValueError):
        events.notice(body, "ec2")
