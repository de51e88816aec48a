"""The adapter against scripted answers: what each one proves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from providers import base
from providers.base import Billing, OfferQuery
from providers.vastai import VastAI
from providers.vastai.limiter import Intervals

from .test_payload import OFFER, SPEC

Handler = Callable[[httpx.Request], httpx.Response]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
ROW: dict[str, Any] = json.loads("""
{"id":7000001,"ask_contract_id":7000001,"machine_id":4242,"host_id":777,"num_gpus":2,"gpu_name":"RTX 4090",
"gpu_ram":24564,
"disk_space":900.0,"inet_up":800.5,"inet_down":950.2,"inet_up_cost":0.02,"inet_down_cost":0.01,"storage_cost":0.15,
"storage_total_cost":0.0125,"dph_base":0.68,"dph_total":0.6925,"min_bid":0.31,"is_bid":false,"dlperf":200.1,
"reliability":0.9981,"verification":"verified","external":null,"geolocation":null,"duration":15000000.0,
"direct_port_count":100}""")
INSTANCE: dict[str, Any] = {
    "id": 31000001,
    "label": "L",
    "actual_status": "running",
    "cur_state": "running",
    "next_state": "running",
    "intended_status": "running",
    "is_bid": True,
    "dph_base": 0.33,
    "dph_total": 0.34,
    "machine_id": 4242,
    "gpu_name": "RTX 4090",
    "start_date": 1767268800.5,
    "public_ipaddr": " 203.0.113.9\n",
    "ports": {"8000/tcp": [{"HostIp": "0.0.0.0", "HostPort": "33526"}], "53/udp": [{"HostPort": "1"}], "22/tcp": None},
}


class Script:
    """A vast.ai that answers what it is told, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []
        self.outcomes: list[tuple[str, str, str]] = []
        self.now = NOW

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, text=body if isinstance(body, str) else json.dumps(body))

    def provider(self) -> VastAI:
        async def sleep(seconds: float) -> None:
            self.now += timedelta(seconds=seconds)

        return VastAI(
            api_key="key",
            transport=httpx.MockTransport(self),
            clock=lambda: self.now,
            interval_scale=0,
            sleep=sleep,
            on_request=lambda *outcome: self.outcomes.append(outcome),
        )


@pytest.mark.parametrize(
    ("answer", "outcome", "made", "doomed", "error"),
    [
        ({"success": True, "new_contract": 31000001}, "created", "31000001", None, None),
        ({"success": False, "error": "x", "new_contract": 31000001}, "refused", None, "31000001", base.ProviderError),
        ((400, {"error": "invalid_price", "new_contract": 31000001}), "refused", None, "31000001", base.BidTooLow),
        ((500, {"error": "boom", "new_contract": 31000001}), "refused", None, "31000001", base.ProviderError),
        ({"success": False, "error": "no_such_ask", "msg": "x"}, "refused", None, None, base.OfferGone),
        ((410, {"success": False, "error": "no_such_ask"}), "refused", None, None, base.OfferGone),
        ((404, {"success": False, "error": "auth_error"}), "refused", None, None, base.AuthError),
        ((429, "too frequent: threshold=4.5"), "refused", None, None, base.RateLimited),
        ((500, {"error": "boom"}), "unknown", None, None, base.Transient),
        ((502, "<html>"), "unknown", None, None, base.Transient),
        ((404, "<html>"), "unknown", None, None, base.MalformedAnswer),
        ((302, ""), "unknown", None, None, base.MalformedAnswer),
        ({"success": True}, "unknown", None, None, base.MalformedAnswer),
        ({"success": True, "new_contract": None}, "unknown", None, None, base.MalformedAnswer),
        ({"success": True, "new_contract": True}, "unknown", None, None, base.MalformedAnswer),
        ((200, "[]"), "unknown", None, None, base.MalformedAnswer),
        ((200, ""), "unknown", None, None, base.MalformedAnswer),
        (httpx.ReadTimeout("slow"), "unknown", None, None, base.Transient),
        (httpx.RemoteProtocolError("cut"), "unknown", None, None, base.Transient),
        (httpx.WriteError("cut"), "unknown", None, None, base.Transient),
        (httpx.ConnectError("refused"), "refused", None, None, base.Transient),
        (httpx.ConnectTimeout("slow"), "refused", None, None, base.Transient),
    ],
)
async def test_what_an_answer_to_a_create_proves(
    answer: Any, outcome: str, made: str | None, doomed: str | None, error: type[Exception] | None
) -> None:
    script = Script(answer)
    result = await script.provider().rent(OFFER, SPEC)
    assert (result.outcome, result.instance_id, result.doomed_id) == (outcome, made, doomed)
    assert isinstance(result.error, error) if error else result.error is None
    assert len(script.asked) == 1
    assert script.asked[0].url.path == "/api/v0/asks/7000001/"
    expected = {"created": "ok", "unknown": "unknown"}.get(outcome) or getattr(result.error, "code", None)
    assert script.outcomes == [("vastai", "create", expected)]


async def test_a_bidless_spot_rent_is_not_sent() -> None:
    script = Script()
    with pytest.raises(base.BadRequest):
        await script.provider().rent(OFFER, replace(SPEC, bid_micros_h=None))
    assert script.asked == []


async def test_concurrent_rents_never_ask_for_one_machine_twice() -> None:
    script = Script(*[{"success": True, "new_contract": 31000000 + i} for i in range(4)])
    provider = script.provider()
    offers = [replace(OFFER, offer_id=str(7000000 + i % 4), machine_id=str(i % 4)) for i in range(12)]
    results = await asyncio.gather(*(provider.rent(offer, SPEC) for offer in offers))
    assert len({r.url.path for r in script.asked}) == len(script.asked) == 4
    assert [r.outcome for r in results].count("created") == 4
    assert all(isinstance(r.error, base.OfferGone) for r in results if r.outcome == "refused")


async def test_a_machine_asked_for_is_left_out_of_the_same_look_only() -> None:
    script = Script((410, {"error": "no_such_ask"}), {"offers": [ROW]}, {"offers": [ROW]})
    provider = script.provider()
    await provider.rent(replace(OFFER, fetched_at=NOW), SPEC)
    query = OfferQuery(Billing.ON_DEMAND)
    assert await provider.search(query) == []
    script.now += timedelta(seconds=1)
    assert [o.machine_id for o in await provider.search(query)] == ["4242"]


async def test_a_rate_limited_create_may_be_tried_again_with_the_same_offer() -> None:
    script = Script((429, "threshold=4.5"), {"success": True, "new_contract": 1})
    provider = script.provider()
    first = await provider.rent(OFFER, SPEC)
    assert isinstance(first.error, base.RateLimited)
    before = script.now
    assert (await provider.rent(OFFER, SPEC)).outcome == "created"
    assert 4.4 < (script.now - before).total_seconds() <= 4.5


async def test_offers_are_priced_without_disk_and_traffic_and_checked_again() -> None:
    unpriced = {**ROW, "id": 2, "min_bid": None, "storage_cost": None}
    other = {**ROW, "id": 3, "gpu_name": "RTX 4090D", "machine_id": 3}
    dear = {**ROW, "id": 4, "machine_id": 4, "min_bid": 0.9, "dph_base": 0.9}
    few_ports = {**ROW, "id": 5, "machine_id": 5, "direct_port_count": 0}
    short = {**ROW, "id": 6, "machine_id": 6, "duration": 60}
    shaky = {**ROW, "id": 7, "machine_id": 7, "reliability": 0.5}
    columns: list[dict[str, Any]] = [
        {"rented": True},
        {"rentable": False},
        {"verification": "unverified"},
        {"disk_space": 59.0},
    ]
    unfit = [{**ROW, "id": 8 + i, "machine_id": 8 + i, **column} for i, column in enumerate(columns)]
    script = Script(*[{"offers": [ROW, unpriced, other, dear, few_ports, short, shaky, *unfit]}] * 2)
    provider = script.provider()
    query = OfferQuery(Billing.ON_DEMAND, ("RTX_4090",), 700_000, 0.9, 3600.0, 1, 60.0)
    (fixed,) = await provider.search(query)
    (spot,) = await provider.search(replace(query, billing=Billing.SPOT_BID))
    assert (fixed.compute_micros_h, spot.compute_micros_h) == (680_000, 310_000)
    assert (fixed.disk_micros_gb_month, fixed.upload_micros_gb, fixed.download_micros_gb) == (150_000, 20_000, 10_000)
    assert (fixed.offer_id, fixed.machine_id, fixed.region, fixed.ports) == ("7000001", "4242", "", 100)
    assert [json.loads(r.content)["type"] for r in script.asked] == ["on-demand", "bid"]


async def test_unknown_cards_are_kept() -> None:
    script = Script({"offers": [{**ROW, "gpu_name": "RTX 9999 Ti"}]})
    (offer,) = await script.provider().search(OfferQuery(Billing.ON_DEMAND))
    assert offer.gpu_name == "RTX 9999 Ti"


@pytest.mark.parametrize("body", [{}, {"offers": None}, {"offers": {}}, {"offers": [{}]}, {"offers": ["x"]}, [], ""])
async def test_a_broken_search_is_no_empty_market(body: Any) -> None:
    with pytest.raises(base.MalformedAnswer):
        await Script(body).provider().search(OfferQuery(Billing.ON_DEMAND))


async def test_an_empty_market_is_empty() -> None:
    assert await Script({"offers": []}).provider().search(OfferQuery(Billing.ON_DEMAND)) == []


async def test_one_instance_is_read() -> None:
    found = await Script({"instances": INSTANCE}).provider().get("31000001")
    assert found is not None
    assert (found.phase, found.billing, found.compute_micros_h) == (base.Phase.RUNNING, Billing.SPOT_BID, 330_000)
    assert (found.public_host, found.ports) == ("203.0.113.9", {8000: 33526})
    assert found.started_at == datetime(2026, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    "change", [{"dph_base": None, "dph_total": None}, {"dph_base": None, "storage_total_cost": None}]
)
async def test_an_unknown_rate_is_not_zero(change: dict[str, Any]) -> None:
    found = await Script({"instances": {**INSTANCE, **change}}).provider().get("31000001")
    assert found is not None
    assert found.compute_micros_h is None


async def test_a_loading_instance_has_not_started_and_has_no_ports() -> None:
    row = {**INSTANCE, "actual_status": "loading", "ports": None, "label": None, "public_ipaddr": None}
    found = await Script({"instances": row}).provider().get("31000001")
    assert found is not None
    assert (found.started_at, found.ports, found.label, found.public_host) == (None, {}, "", None)


@pytest.mark.parametrize("began", [1767268800500, float("nan"), float("inf"), -1, True, "soon"])
async def test_a_start_that_is_no_time_is_not_known_and_the_list_is_read_all_the_same(began: Any) -> None:
    rows = {"instances": [{**INSTANCE, "start_date": began}], "total_instances": 1}
    (found,) = (await Script(rows).provider().list()).instances
    assert (found.phase, found.started_at) == (base.Phase.RUNNING, None)


async def test_gone_only_when_said() -> None:
    gone = (404, {"success": False, "error": "no_such_instance"})
    script = Script({"instances": None}, gone, {}, (404, "<html>"), {"instances": {**INSTANCE, "id": 5}})
    provider = script.provider()
    assert await provider.get("31000001") is None
    assert await provider.get("31000001") is None
    for _ in range(3):
        with pytest.raises(base.MalformedAnswer):
            await provider.get("31000001")


def page(*ids: int, total: Any, token: Any = None) -> dict[str, Any]:
    return {"instances": [{**INSTANCE, "id": i} for i in ids], "total_instances": total, "next_token": token}


async def test_the_list_is_walked_to_its_end() -> None:
    script = Script(page(1, 2, total=5, token="a"), page(3, 4, total=5, token="b"), page(5, total=5))
    listing = await script.provider().list()
    assert listing.complete
    assert [i.instance_id for i in listing.instances] == ["1", "2", "3", "4", "5"]
    assert [r.url.params.get("after_token") for r in script.asked] == [None, "a", "b"]


async def test_fewer_rows_than_announced_are_not_complete() -> None:
    listing = await Script(page(1, 2, total=5)).provider().list()
    assert not listing.complete


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ((410, {"error": "deprecated_endpoint"}), base.EndpointDeprecated),
        ((200, ""), base.MalformedAnswer),
        ((200, '""'), base.MalformedAnswer),
        ({"success": True}, base.MalformedAnswer),
        ({"instances": {}}, base.MalformedAnswer),
        ({"instances": ["x"]}, base.MalformedAnswer),
        ({"instances": [], "next_token": 7}, base.MalformedAnswer),
        ({"instances": [], "next_token": "a"}, base.MalformedAnswer),
        ((404, {"error": "auth_error"}), base.AuthError),
        ((429, "threshold=1.0"), base.RateLimited),
        (httpx.ReadTimeout("slow"), base.Transient),
    ],
)
async def test_a_failed_page_is_no_shorter_list(last: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await Script(page(1, total=2, token="a"), last).provider().list()


async def test_a_hundred_instances_take_four_calls() -> None:
    pages = [page(*range(i, i + 25), total=100, token=str(i) if i < 75 else None) for i in range(0, 100, 25)]
    script = Script(*pages)
    assert len((await script.provider().list()).instances) == 100
    assert len(script.asked) == 4


async def test_release_believes_only_no_such_instance() -> None:
    script = Script(
        {"success": True},
        (404, {"error": "no_such_instance"}),
        (404, {"error": "auth_error", "msg": "Invalid user key"}),
        (404, "<html>"),
        (500, {}),
        (429, "threshold=3.0"),
        {"success": False, "error": "busy", "msg": "try again in 60 s"},
    )
    provider = script.provider()
    await provider.release("31000001")
    await provider.release("31000001")
    for error in (base.AuthError, base.MalformedAnswer, base.Transient, base.RateLimited, base.ProviderError):
        with pytest.raises(error):
            await provider.release("31000001")
    assert {r.method for r in script.asked} == {"DELETE"}


async def test_logs_wait_until_they_are_ready_and_keep_the_key_to_themselves() -> None:
    link = {"success": True, "result_url": "https://logs.invalid/x"}
    script = Script(link, (403, ""), (404, ""), (200, "a\nb\n"), link, *[(404, "")] * 30)
    provider = script.provider()
    assert await provider.logs("31000001", 50) == "a\nb\n"
    assert await provider.logs("31000001", 50) == ""
    assert json.loads(script.asked[0].content) == {"tail": "50"}
    assert all("authorization" not in r.headers for r in script.asked if r.url.host == "logs.invalid")


async def test_balance_is_credit_in_micros() -> None:
    script = Script({"credit": 12.345678, "api_key": "s3cret"}, {"balance": 1, "api_key": "s3cret"})
    provider = script.provider()
    assert (await provider.balance()).credit_micros == 12_345_678
    with pytest.raises(base.MalformedAnswer) as caught:
        await provider.balance()
    assert "s3cret" not in str(caught.value) + caught.value.raw


async def test_charges_are_paged_and_asked_for_in_epoch_ints() -> None:
    def bill(number: int, token: str | None) -> dict[str, Any]:
        kinds = [("gpu", 0.123456), ("disk", 0.002), ("bwd", 0.01), ("bwu", 0.02)]
        items = [{"type": k, "amount": a, "start": 1767268000.0, "end": 1767268800.0} for k, a in kinds]
        row = {"type": "instance", "source": f"instance-{number}", "items": items, "metadata": {"label": "L"}}
        return {"results": [row, {"type": "volume", "items": []}], "next_token": token}

    script = Script(bill(1, "t"), bill(2, None))
    charges = await script.provider().charges(NOW - timedelta(hours=1))
    assert [(c.instance_id, c.kind, c.micros) for c in charges[:4]] == [
        ("1", "gpu", 123_456),
        ("1", "disk", 2_000),
        ("1", "download", 10_000),
        ("1", "upload", 20_000),
    ]
    assert {c.instance_id for c in charges} == {"1", "2"}
    filters = json.loads(script.asked[0].url.params["select_filters"])
    assert filters["day"] == {"gte": 1767265200, "lte": 1767268800}
    with pytest.raises(base.MalformedAnswer):
        await Script({"results": [{"type": "instance", "items": [{"type": "tax"}]}]}).provider().charges(NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": ["L"]},
        {"items": [{"type": "gpu", "amount": 0.1, "start": 1767268000.0, "end": 1e300}]},
        {"items": [{"type": "gpu", "amount": 0.1, "start": 1767268000000, "end": 1767268800.0}]},
        {"items": [{"type": "gpu", "amount": None, "start": 1767268000.0, "end": 1767268800.0}]},
        {"items": ["gpu"]},
    ],
)
async def test_a_bill_that_can_t_be_read_is_said_to_be_so(change: dict[str, Any]) -> None:
    row = {"type": "instance", "source": "instance-1", "items": [], "metadata": {"label": "L"}, **change}
    with pytest.raises(base.MalformedAnswer):
        await Script({"results": [row]}).provider().charges(NOW - timedelta(hours=1))


async def test_it_is_a_provider_without_notices_and_hides_its_key() -> None:
    provider = VastAI(api_key="s3cret", transport=httpx.MockTransport(Script()))
    assert isinstance(provider, base.Provider)
    assert "s3cret" not in repr(provider)
    assert [notice async for notice in provider.notices()] == []
    assert provider.caps.idempotency_key is False
    await provider.aclose()


async def test_calls_of_a_kind_keep_their_distance() -> None:
    now, slept = 100.0, []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    line = Intervals(2.0, clock=lambda: now, sleep=sleep)
    for call in ("create", "create", "create", "list"):
        await line.wait(call)
    assert slept == [9.0, 18.0]
    line.penalise("list", 30.0)
    await line.wait("list")
    assert slept[-1] == 30.0


async def test_a_quota_that_is_used_up_for_hours_is_an_answer_at_once_and_no_request() -> None:
    script = Script(
        (429, {"error": "search_quota_exceeded", "msg": "daily"}), {"offers": []}, (429, "threshold=3600"), ROW
    )
    time = 0.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    provider = VastAI(
        api_key="key",
        transport=httpx.MockTransport(script),
        clock=lambda: NOW,
        interval_scale=0,
        sleep=sleep,
        monotonic=lambda: time,
    )
    query = OfferQuery(Billing.SPOT_BID)
    for _ in range(3):
        with pytest.raises(base.RateLimited) as caught:
            await provider.search(query)
        assert caught.value.wait_s == 12 * 3600
    assert len(script.asked) == 1
    time = 12 * 3600.0
    assert await provider.search(query) == []
    for _ in range(2):
        result = await provider.rent(OFFER, SPEC)
        assert (result.outcome, type(result.error)) == ("refused", base.RateLimited)
    assert len(script.asked) == 3, "the second create was not sent"
    assert slept == []
