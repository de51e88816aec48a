"""RunPod's adapter against scripted answers: what each one proves, what is sent, how rows are read."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from providers import base
from providers.base import Billing, OfferQuery, Phase, RentSpec
from providers.runpod import RunPod
from providers.runpod.names import gpu_name
from providers.runpod.payload import create_body
from providers.runpod.phases import phase_of

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SPEC = RentSpec("echo2:f:l:1", "img:1", "echo 'hi'\nexec echo2 agent", {"ECHO2_JOIN_TOKEN": "jt_secret"}, 20.5, (7070,))
CARD: dict[str, Any] = {
    "id": "NVIDIA GeForce RTX 4090", "name": "RTX 4090", "memory": 24, "secure": True, "community": False,
    "price": {"secure": 0.44, "community": 0.31}, "maxCount": {"secure": 4, "community": 2}, "availability": "HIGH",
    "dataCenters": [{"id": "US-KS-2", "name": "x", "availability": "LOW"}, {"id": "B", "availability": "NONE"}],
}  # fmt: skip
POD: dict[str, Any] = {
    "id": "7h9k2m4n6p", "name": "echo2:f:l:1", "status": "RUNNING", "cloud": "SECURE", "dataCenterId": "US-KS-2",
    "gpu": {"id": "NVIDIA H100 80GB HBM3", "count": 2}, "cost": 5.98, "env": {"ECHO2_JOIN_TOKEN": "jt_secret"},
    "startedAt": "2026-06-01T12:02:00Z",
    "runtime": {"ports": [{"private": 7070, "public": 34446, "type": "tcp", "ip": "195.26.233.3"},
                          {"private": 80, "public": 80, "type": "http", "ip": "10.0.0.1"},
                          {"private": 22, "public": None, "type": "tcp", "ip": None}]},
}  # fmt: skip


def problem(status: int, detail: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"title": "t", "status": status, "detail": detail}, headers=headers)


class Script:
    """A RunPod that answers what it is told, and remembers what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []
        self.outcomes: list[str] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def provider(self, **more: Any) -> RunPod:
        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        return RunPod(
            api_key="rpa_key", transport=httpx.MockTransport(self), clock=lambda: NOW, sleep=sleep,
            on_request=lambda name, call, outcome: self.outcomes.append(outcome), **{"clouds": ("SECURE",), **more},
        )  # fmt: skip


async def an_offer(**changes: Any) -> base.Offer:
    script = Script(httpx.Response(200, json={"gpus": [{**CARD, **changes}]}))
    return (await script.provider().search(OfferQuery(Billing.ON_DEMAND)))[0]


FULL = "There are no longer any instances available with the requested specifications."


@pytest.mark.parametrize(
    ("answer", "outcome", "error"),
    [
        (httpx.Response(201, json=POD), "created", None),
        (httpx.Response(201, json={}), "unknown", base.MalformedAnswer),
        (httpx.Response(201, json={"id": 7}), "unknown", base.MalformedAnswer),
        (httpx.Response(200, text="<html>"), "unknown", base.MalformedAnswer),
        (httpx.Response(302, headers={"location": "/"}), "unknown", base.MalformedAnswer),
        (problem(400, FULL), "refused", base.NoCapacity),
        (problem(400, "This GPU and data center combination could not be placed"), "refused", base.NoCapacity),
        (problem(400, "exactly one of gpu or cpu must be set"), "refused", base.BadRequest),
        (problem(400, "insufficient balance"), "refused", base.CreditError),
        (problem(401, "missing bearer token"), "refused", base.AuthError),
        (problem(402, "Insufficient balance."), "refused", base.CreditError),
        (problem(403, "access denied"), "refused", base.AuthError),
        (problem(403, "your account cannot access this GPU pool"), "refused", base.QuotaError),
        (problem(404, "resource not found"), "refused", base.OfferGone),
        (problem(422, "Request validation failed."), "refused", base.BadRequest),
        (problem(429, "slow down", **{"Retry-After": "12"}), "refused", base.RateLimited),
        (problem(500, "boom"), "unknown", base.Transient),
        (httpx.Response(502, text="<html>"), "unknown", base.Transient),
        (httpx.Response(403, text="<html>"), "unknown", base.MalformedAnswer),
        (httpx.Response(404, text="<html>"), "unknown", base.MalformedAnswer),
        (httpx.ReadTimeout("slow"), "unknown", base.Transient),
        (httpx.RemoteProtocolError("cut"), "unknown", base.Transient),
        (httpx.ConnectError("refused"), "refused", base.Transient),
    ],
)
async def test_what_an_answer_to_a_create_proves(answer: Any, outcome: str, error: type[Exception] | None) -> None:
    script = Script(answer)
    result = await script.provider().rent(await an_offer(), SPEC)
    assert result.outcome == outcome
    assert type(result.error) is (error or type(None))
    assert (result.instance_id == "7h9k2m4n6p") is (outcome == "created")
    assert [(r.method, r.url.path) for r in script.asked] == [("POST", "/v2/pods")]
    assert len(script.outcomes) == 1
    assert "jt_secret" not in repr(result) + (result.error.raw if result.error else "")


async def test_a_create_without_an_id_does_not_leak_the_environment() -> None:
    answer = httpx.Response(201, json={"name": "x", "env": {"ECHO2_JOIN_TOKEN": "jt_secret"}})
    result = await Script(answer).provider().rent(await an_offer(), SPEC)
    assert result.error is not None
    assert "name" in result.error.raw
    assert "jt_secret" not in result.error.raw


@pytest.mark.parametrize("billing", [Billing.SPOT_BID, Billing.SPOT_MARKET])
async def test_spot_is_refused_before_any_call(billing: Billing) -> None:
    script = Script()
    provider = script.provider()
    with pytest.raises(base.CapabilityError, match="on_demand"):
        await provider.search(OfferQuery(billing))
    with pytest.raises(base.CapabilityError):
        await provider.rent(replace(await an_offer(), billing=billing), replace(SPEC, bid_micros_h=1))
    assert script.asked == []


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, bid_micros_h=1), replace(SPEC, label=""), replace(SPEC, onstart=" "), replace(SPEC, disk_gb=0.0),
        replace(SPEC, ports=(0,)), replace(SPEC, ports=tuple(range(1, 12))), replace(SPEC, env={"A B": "x"}),
    ],
)  # fmt: skip
async def test_an_order_that_runpod_would_misread_is_not_sent(spec: RentSpec) -> None:
    script = Script()
    with pytest.raises(base.BadRequest):
        await script.provider().rent(await an_offer(), spec)
    assert script.asked == []


async def test_the_order_is_for_the_pool_that_was_quoted() -> None:
    body = create_body(await an_offer(), SPEC)
    assert (body["name"], body["image"], body["cloud"]) == (SPEC.label, "img:1", "SECURE")
    assert body["gpu"] == {"id": "NVIDIA GeForce RTX 4090", "count": 1}
    assert (body["dataCenterIds"], body["disk"], body["ports"]) == (["US-KS-2"], 21, ["7070/tcp"])
    assert body["env"] == {"ECHO2_JOIN_TOKEN": "jt_secret"}
    assert None not in body.values()


async def test_the_arguments_are_one_bash_script_that_knows_its_public_side() -> None:
    spec = replace(SPEC, onstart="echo 'it'\"s\" $PUBLIC_IPADDR:$VAST_TCP_PORT_7070")
    words = shlex.split(create_body(await an_offer(), spec)["args"])
    assert words[:2] == ["bash", "-c"]
    env = {"RUNPOD_PUBLIC_IP": "203.0.113.7", "RUNPOD_TCP_PORT_7070": "40123", "PATH": "/usr/bin:/bin"}
    done = await asyncio.to_thread(subprocess.run, words, env=env, capture_output=True, text=True, timeout=10)
    assert done.stdout == "its 203.0.113.7:40123\n"


async def test_prices_are_per_gpu_and_only_of_clouds_that_have_the_card() -> None:
    rows = [CARD, {**CARD, "id": "NVIDIA L40S", "community": True, "dataCenters": None}]
    script = Script(*(httpx.Response(200, json={"gpus": rows}) for _ in range(4)))
    found = await script.provider(clouds=("SECURE", "COMMUNITY"), counts=(1, 4)).search(OfferQuery(Billing.ON_DEMAND))
    seen = {(o.gpu_name, o.num_gpus, o.raw_status, o.region): o.compute_micros_h for o in found}
    assert seen == {
        ("RTX 4090", 1, "SECURE LOW", "US-KS-2"): 440_000,
        ("RTX 4090", 4, "SECURE LOW", "US-KS-2"): 1_760_000,
        ("L40S", 1, "SECURE HIGH", ""): 440_000,
        ("L40S", 4, "SECURE HIGH", ""): 1_760_000,
        ("L40S", 1, "COMMUNITY HIGH", ""): 310_000,
    }
    asked = [dict(r.url.params) for r in script.asked]
    assert asked[0] == {"include": "AVAILABILITY", "product": "POD", "cloud": "SECURE", "count": "1"}
    assert len({o.offer_id for o in found}) == len(found)
    assert {o.upload_micros_gb + o.download_micros_gb for o in found} == {0}


@pytest.mark.parametrize(
    "change",
    [{"price": {}}, {"price": {"secure": None}}, {"price": {"secure": 0}}, {"availability": None}, {"maxCount": 4}],
)
async def test_a_card_without_a_readable_price_is_no_offer(change: dict[str, Any]) -> None:
    script = Script(httpx.Response(200, json={"gpus": [{**CARD, **change}, CARD]}))
    assert len(await script.provider().search(OfferQuery(Billing.ON_DEMAND))) == 1
    alone = Script(httpx.Response(200, json={"gpus": [{**CARD, **change}]}))
    with pytest.raises(base.MalformedAnswer):
        await alone.provider().search(OfferQuery(Billing.ON_DEMAND))


async def test_no_stock_is_an_empty_search_not_an_error() -> None:
    script = Script(httpx.Response(200, json={"gpus": [{**CARD, "availability": "NONE", "dataCenters": None}]}))
    assert await script.provider().search(OfferQuery(Billing.ON_DEMAND)) == []


@pytest.mark.parametrize(
    ("gpu_id", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("NVIDIA RTX A6000", "RTX A6000"), ("NVIDIA RTX  A5000", "RTX A5000"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA A40", "A40"), ("NVIDIA A100 80GB PCIe", "A100 PCIE"), ("NVIDIA A100-SXM4-80GB", "A100 SXM4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 NVL", "H100 NVL"), ("NVIDIA H100 PCIe", "H100 PCIE"),
        ("NVIDIA H200", "H200"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 WS"),
        ("AMD Instinct MI300X OAM", "AMD Instinct MI300X OAM"), ("NVIDIA ", "NVIDIA"),
    ],
)  # fmt: skip
def test_cards_get_the_names_of_the_table_of_gpus(gpu_id: str, name: str) -> None:
    assert gpu_name(gpu_id) == name


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ("PROVISIONING", Phase.PENDING), ("STARTING", Phase.LOADING), ("RUNNING", Phase.RUNNING),
        ("EXITED", Phase.PAUSED), ("ERROR", Phase.FAILED), ("TERMINATED", Phase.TERMINATING),
        ("REBOOTING", Phase.UNKNOWN), ("", Phase.UNKNOWN), (None, Phase.UNKNOWN), (3, Phase.UNKNOWN),
    ],
)  # fmt: skip
def test_phases(status: object, phase: Phase) -> None:
    assert phase_of(status) is phase


async def test_a_pod_tells_what_is_really_billed_and_where_it_is_reached() -> None:
    pod = await Script(httpx.Response(200, json=POD)).provider().get("7h9k2m4n6p")
    assert pod is not None
    assert (pod.compute_micros_h, pod.gpu_name, pod.label) == (5_980_000, "H100 SXM", "echo2:f:l:1")
    assert (pod.public_host, dict(pod.ports)) == ("195.26.233.3", {7070: 34446})
    assert pod.started_at == datetime(2026, 6, 1, 12, 2, tzinfo=UTC)
    offer = await an_offer(id="NVIDIA H100 80GB HBM3")
    assert pod.machine_id == offer.machine_id


@pytest.mark.parametrize(
    ("change", "rate"),
    [({"cost": 0}, None), ({"cost": None}, None), ({"cost": "1"}, None), ({"cost": 0.0, "status": "EXITED"}, 0)],
)
async def test_an_unknown_rate_is_never_zero(change: dict[str, Any], rate: int | None) -> None:
    pod = await Script(httpx.Response(200, json={**POD, **change})).provider().get("7h9k2m4n6p")
    assert pod is not None
    assert pod.compute_micros_h == rate


async def test_what_is_terminated_is_gone() -> None:
    over = {**POD, "status": "TERMINATED"}
    assert await Script(httpx.Response(200, json=over)).provider().get("7h9k2m4n6p") is None
    listing = await Script(httpx.Response(200, json={"pods": [over, {**POD, "id": "b"}]})).provider().list()
    assert listing.complete
    assert [i.instance_id for i in listing.instances] == ["b"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(204), None), (problem(404, "pod not found"), None),
        (httpx.Response(404, text="<html>not found"), base.MalformedAnswer),
        (problem(404, "no such route"), base.MalformedAnswer), (problem(410, "retired"), base.EndpointDeprecated),
        (problem(401, "no"), base.AuthError), (problem(403, "access denied"), base.AuthError),
        (problem(409, "pod belongs to a cluster"), base.BadRequest), (problem(429, "slow"), base.RateLimited),
        (problem(500, "boom"), base.Transient), (httpx.ReadTimeout("slow"), base.Transient),
    ],
)  # fmt: skip
async def test_only_runpods_own_answer_means_released(answer: Any, error: type[Exception] | None) -> None:
    provider = Script(answer).provider()
    if error is None:
        await provider.release("7h9k2m4n6p")
        return
    with pytest.raises(error):
        await provider.release("7h9k2m4n6p")


async def test_an_id_that_is_a_path_is_not_sent() -> None:
    script = Script()
    for act in (script.provider().release("../account"), script.provider().get("")):
        with pytest.raises(base.BadRequest):
            await act
    assert script.asked == []


@pytest.mark.parametrize("body", [[], {}, {"pods": {}}, {"pods": [{"name": "x"}]}, {"pods": [None]}, "nothing"])
async def test_a_list_that_can_t_be_read_raises(body: Any) -> None:
    with pytest.raises(base.MalformedAnswer):
        await Script(httpx.Response(200, text=json.dumps(body))).provider().list()


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"Retry-After": "12"}, 12.0), ({"RateLimit": '"minute";r=0;t=7, "hour";r=0;t=30, "day";r=9;t=99'}, 30.0),
        ({"Retry-After": "soon"}, 10.0), ({}, 10.0),
    ],
)  # fmt: skip
async def test_a_429_says_how_long(headers: dict[str, str], wait: float) -> None:
    with pytest.raises(base.RateLimited) as caught:
        await Script(problem(429, "slow", **headers)).provider().list()
    assert caught.value.wait_s == wait


async def test_after_a_429_the_call_waits_or_is_not_made() -> None:
    script = Script(problem(429, "slow", **{"Retry-After": "5"}), httpx.Response(200, json={"pods": []}))
    provider = script.provider()
    with pytest.raises(base.RateLimited):
        await provider.list()
    await provider.list()
    assert script.slept == [pytest.approx(5, abs=0.5)]
    script = Script(problem(429, "slow", **{"Retry-After": "600"}))
    provider = script.provider()
    offer = await an_offer()
    await provider.rent(offer, SPEC)
    again = await provider.rent(offer, SPEC)
    assert again.outcome == "refused"
    assert isinstance(again.error, base.RateLimited)
    assert len(script.asked) == 1


async def test_logs_are_the_last_lines_of_the_container() -> None:
    text = "".join(f'id: {i}\ndata: {{"source":"container","line":"line {i}","ts":"x"}}\n\n' for i in range(3))
    script = Script(httpx.Response(200, text=": keep-alive\n\n" + text), problem(404, "pod not found"))
    provider = script.provider()
    assert await provider.logs("abc", 2) == "line 0\nline 1"
    assert dict(script.asked[0].url.params) == {"source": "container", "tail": "2"}
    assert await provider.logs("abc", 2) == ""


async def test_the_bill_is_read_by_pod_and_hour() -> None:
    record = {
        "startTime": "2026-01-01T11:00:00Z", "endTime": "2026-01-01T12:00:00Z", "podId": "abc", "totalAmount": 0.45,
        "gpuAmount": 0.44, "cpuAmount": 0, "diskAmount": 0.01,
    }  # fmt: skip
    script = Script(httpx.Response(200, json={"records": [record]}))
    bill = await script.provider().charges(datetime(2026, 1, 1, 11, 30, tzinfo=UTC))
    assert [(c.instance_id, c.kind, c.micros) for c in bill] == [("abc", "gpu", 440_000), ("abc", "disk", 10_000)]
    assert script.asked[0].url.params["startTime"] == "2026-01-01T11:00:00Z"
    for wrong in ({**record, "gpuAmount": None}, {**record, "endTime": "?"}, None):
        with pytest.raises(base.MalformedAnswer):
            await Script(httpx.Response(200, json={"records": [wrong]})).provider().charges(NOW)


Build = Callable[[], RunPod]


@pytest.mark.parametrize(
    "build", [lambda: RunPod(clouds=("PUBLIC",)), lambda: RunPod(counts=(0,)), lambda: RunPod(counts=())]
)
def test_settings_that_can_t_be_are_refused(build: Build) -> None:
    with pytest.raises(base.BadRequest):
        build()
