"""Refusals that tell of the account or of a whole kind of machine, and lists that can't be read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from app.fleet.market import family
from providers.base import EndpointDeprecated, Offer, OfferQuery, QuotaError, RateLimited, Transient
from providers.vastai import VastAI
from tests.integration.control.fake_provider import FakeProvider, Machine, machines_of
from tests.integration.control.rig import FakeClock, World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


@dataclass
class Zoned(FakeProvider):
    """Its machines are in zones: the machine's id is also its zone."""

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Each in its zone."""
        return [replace(o, region=o.machine_id) for o in await super().search(query)]


@pytest.mark.parametrize(
    ("gpu", "region", "key"),
    [
        ("L4", "us-east-1a", "gpu:L4:us-east-1"),
        ("RTX_4090", "us-central1-b", "gpu:RTX 4090:us-central1"),
        ("L4", "EU-RO-1", "gpu:L4:EU-RO-1"),
        ("L4", "Sweden, SE", "gpu:L4:Sweden, SE"),
        ("L4", "", "gpu:L4:"),
    ],
)
def test_a_quota_counts_cards_by_region(gpu: str, region: str, key: str) -> None:
    assert family(gpu, region) == key


async def test_a_full_quota_is_not_tried_again_with_its_kind_for_an_hour(
    open_world: OpenWorld, clock: FakeClock
) -> None:
    zoned = Zoned(
        clock,
        [
            Machine("us-east-1a", 200_000, "L4"),
            Machine("us-east-1b", 210_000, "L4"),
            Machine("us-west-2a", 400_000, "L4"),
            Machine("us-east-1c", 900_000, "RTX 4090"),
        ],
        name="zoned",
        refusal=QuotaError("MaxSpotInstanceCountExceeded"),
    )
    zoned.outcomes.append("refuse")
    async with open_world(others=[zoned]) as control:
        job_id = await control.create(fleet={"providers": ["zoned"]})
        await control.ready_learner(job_id)
        await control.round()
        await control.round(10)
        assert not set(zoned.live_machines()) & {"us-east-1a", "us-east-1b"}
        assert zoned.live()
        offers = (await control.get("/v1/offers", job_id=job_id))["items"]
        why = {o["machine_id"]: o["excluded"] for o in offers}
        assert "quota: MaxSpotInstanceCountExceeded" in why["us-east-1b"]
        clock.advance(3500)
        await control.round()
        why = {o["machine_id"]: o["excluded"] for o in (await control.get("/v1/offers", job_id=job_id))["items"]}
        assert why["us-east-1b"]
        clock.advance(120)
        why = {o["machine_id"]: o["excluded"] for o in (await control.get("/v1/offers", job_id=job_id))["items"]}
        assert why["us-east-1b"] is None


async def test_asked_too_often_leaves_the_account_in_peace_and_blames_no_machine(
    open_world: OpenWorld, provider: FakeProvider, clock: FakeClock
) -> None:
    other = FakeProvider(clock, machines_of(x1=0.9), name="second")
    provider.outcomes.append("refuse")
    provider.refusal = RateLimited("too frequent", wait_s=300)
    async with open_world(others=[other]) as control:
        job_id = await control.create()
        await control.ready_learner(job_id)
        await control.round()
        await control.round(10)
        assert provider.creates.total() == 1
        assert other.live_machines() == ["x1"]
        shown = {p["name"]: p for p in (await control.get("/v1/fleet"))["providers"]}
        assert "300 s of peace" in shown["marketplace"]["reason"]
        clock.advance(310)
        await control.round(60)
        assert (await control.get("/v1/fleet"))["providers"][0]["usable"]
        offers = (await control.get("/v1/offers", job_id=job_id))["items"]
        assert not [o for o in offers if (o["excluded"] or "").startswith("cooling")]


async def test_a_short_wait_is_no_more_than_another_try(control: World, provider: FakeProvider) -> None:
    provider.outcomes.append("refuse")
    provider.refusal = RateLimited("too frequent", wait_s=4.5)
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.round(10)
    assert [(x.machine_id, x.state) for x in await control.leases()] == [("m1", "refused"), ("m1", "booting")]


@pytest.mark.parametrize("error", [EndpointDeprecated("retired"), Transient("502")], ids=lambda e: e.code)
async def test_where_the_list_can_t_be_read_nothing_is_rented_and_the_job_goes_on_elsewhere(
    open_world: OpenWorld, provider: FakeProvider, clock: FakeClock, error: Transient
) -> None:
    other = FakeProvider(clock, machines_of(x1=0.9), name="second")
    provider.list_error = error
    async with open_world(others=[other]) as control:
        await control.round(10)
        job_id = await control.create()
        await control.ready_learner(job_id)
        await control.round(10)
        await control.round(10)
        assert provider.creates.total() == 0
        assert other.live_machines() == ["x1"]
        shown = {p["name"]: p for p in (await control.get("/v1/fleet"))["providers"]}
        assert not shown["marketplace"]["usable"]
        assert str(error) in shown["marketplace"]["reason"]
        assert shown["second"]["usable"]


async def test_one_list_that_fails_changes_nothing(control: World, provider: FakeProvider) -> None:
    provider.list_error = Transient("502")
    job_id = await control.create()
    await control.ready_learner(job_id)
    provider.list_error = None
    await control.round(10)
    assert provider.creates.total() == 1


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(410, json={"success": False, "error": "deprecated_endpoint", "msg": "retired"}),
        httpx.Response(200, text=""),
        httpx.Response(200, json=""),
        httpx.Response(200, json={"instances": None}),
        httpx.Response(200, json={"success": True}),
        httpx.Response(200, json={"instances": [None]}),
        httpx.Response(200, text="<html>"),
    ],
    ids=["410", "nothing", "empty text", "null", "no rows", "null row", "html"],
)
async def test_an_unreadable_list_is_never_an_empty_fleet(
    open_world: OpenWorld, clock: FakeClock, answer: httpx.Response
) -> None:
    made = 0
    good = True

    def vast(request: httpx.Request) -> httpx.Response:
        nonlocal made
        path = request.url.path
        if path == "/api/v0/users/current":
            return httpx.Response(200, json={"credit": 100.0})
        if path == "/api/v0/bundles/":
            return httpx.Response(200, json={"offers": [_offer(i) for i in range(5)]})
        if path.startswith("/api/v0/asks/"):
            made += 1
            return httpx.Response(200, json={"success": True, "new_contract": 100 + made})
        if path == "/api/v1/instances/":
            return httpx.Response(200, json={"instances": [], "total_instances": 0}) if good else answer
        return httpx.Response(200, json={"success": True, "results": []})

    vastai = VastAI(api_key="k" * 20, transport=httpx.MockTransport(vast), clock=lambda: _at(clock), interval_scale=0.0)
    async with open_world(others=[vastai]) as control:
        job_id = await control.create(fleet={"providers": ["vastai"]})
        await control.ready_learner(job_id)
        await control.round()
        assert made == 1
        good = False
        for _ in range(10):
            await control.round(10)
        assert [x.state for x in await control.leases()] == ["booting"]
        assert made == 1, "a list that says nothing rents nothing"


def _at(clock: FakeClock) -> datetime:
    return datetime.fromtimestamp(clock.now, UTC)


def _offer(number: int) -> dict[str, Any]:
    prices = {"dph_base": 0.3 + number / 10, "storage_cost": 0.1, "inet_up_cost": 0.0, "inet_down_cost": 0.0}
    shape = {"num_gpus": 1, "gpu_ram": 24564, "inet_up": 500, "inet_down": 500, "reliability": 0.99}
    return {"id": number + 1, "machine_id": number + 1, "gpu_name": "RTX 4090", **prices, **shape}
