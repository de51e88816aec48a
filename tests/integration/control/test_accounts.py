"""Several providers and their accounts; caps over all jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.protocol.base import micros
from providers.base import AuthError, CapabilityError, CreditError, ProviderError, Transient
from providers.runpod import RunPod
from providers.vastai import VastAI
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider, machines_of
from tests.integration.control.rig import ADMIN_KEY, WEBHOOK_SECRET, FakeClock, Learner, Node_, World

Opener = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def other(clock: FakeClock) -> FakeProvider:
    """A dearer provider whose offers carry the same numbers as those of the first."""
    return FakeProvider(clock, machines_of(m1=0.6, m2=0.7), name="second")


def row(view: Any, name: str) -> Any:
    return next(p for p in view["providers"] if p["name"] == name)


async def provisioned(control: World, nodes: float = 1.0, **job: Any) -> tuple[str, Learner]:
    """A job that has rented what it may."""
    job_id = await control.create(**job)
    learner = await control.ready_learner(job_id, nodes)
    await control.round()
    return job_id, learner


@pytest.mark.parametrize("error", [AuthError("bad key"), CreditError("nothing left"), None], ids=str)
async def test_provider_that_cannot_be_paid_is_left_out_and_the_job_goes_on_with_the_others(
    open_world: Opener, provider: FakeProvider, other: FakeProvider, error: ProviderError | None
) -> None:
    provider.credit = error or -1
    async with open_world(others=[other]) as control:
        job_id, learner = await provisioned(control)
        assert provider.creates.total() == 0
        assert other.live_machines() == ["m1"]
        shown = row(await control.get("/v1/fleet"), "marketplace")
        assert not shown["usable"]
        assert (str(error) if error else "no credit is left: $-0.000001") in shown["reason"]
        assert row(await control.get("/v1/fleet"), "second")["usable"]
        offers = (await control.get("/v1/offers", job_id=job_id))["items"]
        assert {o["provider"] for o in offers if o["excluded"] is None} == {"second"}
        assert any(o["provider"] == "marketplace" and "marketplace:" in o["excluded"] for o in offers)
        await control.rounds(5, 10, learner)
        assert (await control.kinds(job_id)).count("provider_unusable") == 1

        provider.credit = 10**9
        await control.rounds(3, 30, learner)
        assert (await control.kinds(job_id)).count("provider_usable") == 1
        assert row(await control.get("/v1/fleet"), "marketplace")["usable"]


async def test_create_call_refused_for_want_of_credit_blames_the_account_and_not_the_machine(
    open_world: Opener, provider: FakeProvider, other: FakeProvider
) -> None:
    provider.outcomes.append("refuse")
    provider.refusal = CreditError("one hour of credit is needed")
    provider.credit = CapabilityError("tells no balance")
    async with open_world(others=[other]) as control:
        job_id, learner = await provisioned(control)
        await control.rounds(30, 10, learner)
        assert provider.creates.total() == 1
        assert other.live_machines() == ["m1"]
        assert "one hour of credit" in row(await control.get("/v1/fleet"), "marketplace")["reason"]
        await control.rounds(40, 10, learner)
        assert row(await control.get("/v1/fleet"), "marketplace")["usable"]
        offers = (await control.get("/v1/offers", job_id=job_id))["items"]
        assert not [o for o in offers if o["provider"] == "marketplace" and o["excluded"]]


async def test_balance_that_is_not_answered_changes_nothing(open_world: Opener, provider: FakeProvider) -> None:
    provider.credit = Transient("502")
    async with open_world() as control:
        await provisioned(control)
        assert provider.live_machines() == ["m1"]
        shown = row(await control.get("/v1/fleet"), "marketplace")
        assert (shown["usable"], shown["credit_usd"]) == (True, None)


async def test_low_credit_stops_renting_there_and_only_there(
    open_world: Opener, provider: FakeProvider, other: FakeProvider
) -> None:
    provider.credit = 900_000
    async with open_world(others=[other], min_credit_hours=2, max_usd_total=100) as control:
        job_id, learner = await provisioned(control, nodes=3, fleet={"max_nodes": 3})
        await control.rounds(4, 10, learner)
        # $0.30 with its disk for two hours fits into 90 cents, and no other beside it.
        assert provider.live_machines() == ["m1"]
        assert len(other.live_machines()) == 2
        assert row(await control.get("/v1/fleet"), "marketplace")["credit_usd"] == "0.900000"
        provider.credit = 500_000
        await control.rounds(3, 10, learner)
        assert (await control.kinds(job_id)).count("provider_low_credit") == 1
        assert "min_credit_hours" in row(await control.get("/v1/fleet"), "marketplace")["reason"]
        assert provider.live_machines() == ["m1"]
        provider.credit = 5_000_000
        await control.rounds(3, 10, learner)
        assert (await control.kinds(job_id)).count("provider_credit_ok") == 1


async def test_fleet_is_given_back_before_the_credit_is_gone(
    open_world: Opener, provider: FakeProvider, other: FakeProvider
) -> None:
    async with open_world(others=[other]) as control:
        job_id, learner = await provisioned(control)
        node = await control.join(provider.live()[0])
        await control.rounds(2, 10, learner, node)
        provider.credit = 8_000  # of $0.30 an hour: less than two minutes
        await control.rounds(2, 10, learner, node)
        assert node.directives["drain"]
        await control.rounds(6, 10, learner)
        assert provider.live() == []
        assert other.live_machines() == ["m1"]
        assert "nearly used up" in " ".join(e.message for e in await control.events(job_id))


def hourly(control: World) -> int:
    """What really runs, micro-dollars an hour with its disk."""
    return sum(r.rate_micros_h + 100_000 for r in control.provider.live())


async def test_jobs_share_the_cap_per_hour_and_go_on_when_there_is_room(
    open_world: Opener, provider: FakeProvider
) -> None:
    provider.outcomes.extend(["unknown_created"])
    provider.listing_lag_s = 25
    async with open_world(max_usd_per_hour="0.75") as control:
        first, learner = await provisioned(control)
        second, other_learner = await provisioned(control)
        third, last = await provisioned(control)
        players = [learner, other_learner, last]
        for _ in range(4):
            await control.rounds(1, 10, *players)
            assert hourly(control) <= 750_000
        # $0.30 and $0.40 are rented; the third would make it $1.20.
        assert len(provider.live()) == 2
        caps = (await control.get("/v1/fleet"))["caps"]
        assert caps["max_usd_per_hour"] == "0.750000"
        assert 0.70 <= float(caps["usd_per_hour"]) <= 0.75
        assert [h["job_id"] for h in caps["held"]] == [third]
        assert "max_usd_per_hour 0.750000" in caps["held"][0]["reason"]
        assert (await control.kinds(third)).count("renting_held") == 1
        assert (await control.job(third))["status"] == "provisioning"

        await control.http.post(f"/v1/jobs/{first}/cancel")
        await learner.done("finished")
        for _ in range(12):
            await control.rounds(1, 10, other_learner, last)
            assert hourly(control) <= 750_000
        assert {x.job_id for x in await control.leases() if x.state in ("booting", "active")} == {second, third}
        assert (await control.kinds(third)).count("renting_free") == 1
        assert (await control.get("/v1/fleet"))["caps"]["held"] == []


async def test_cap_per_hour_takes_what_fits_and_not_only_the_best(open_world: Opener, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.5, m2=0.5, m3=0.5)
    async with open_world(max_usd_per_hour="1.3") as control:
        job_id, _ = await provisioned(control, nodes=3)
        assert len(provider.live()) == 2
        assert (await control.kinds(job_id)).count("renting_held") == 1


async def test_job_that_a_cap_holds_up_waits_and_does_not_fail(open_world: Opener, provider: FakeProvider) -> None:
    async with open_world(max_usd_per_hour="0.1") as control:
        job_id, learner = await provisioned(control)
        for _ in range(70):
            await control.rounds(1, 120, learner)
        assert provider.creates.total() == 0
        assert (await control.job(job_id))["status"] == "provisioning"
        (told,) = [e for e in await control.events(job_id) if e.kind == "no_progress"]
        assert "renting is held up: max_usd_per_hour" in told.message
        await control.http.post(f"/v1/jobs/{job_id}/pause")
        await control.round(1)
        assert (await control.get("/v1/fleet"))["caps"]["held"] == []


async def test_what_is_being_released_counts_until_it_is_seen_gone(open_world: Opener, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.5, m2=0.51)
    async with open_world(max_usd_per_hour="0.7") as control:
        _, learner = await provisioned(control)
        provider.release_failures = 6
        provider.fail("1")
        for _ in range(30):
            await control.rounds(1, 10, learner)
            assert hourly(control) <= 700_000
        assert [r.instance_id for r in provider.live()] == ["2"]


async def test_price_rise_above_the_cap_gives_the_dearest_back(open_world: Opener, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.5, m2=0.6)
    async with open_world(max_usd_per_hour="1.4") as control:
        _, learner = await provisioned(control, nodes=2)
        assert len(provider.live()) == 2
        # Within the 5 % that a provider may bill above its quote.
        for rented in provider.live():
            rented.rate_micros_h = round(rented.rate_micros_h * 1.1)
        provider.machines = []
        provider.rented["1"].rate_micros_h = 500_000
        provider.rented["2"].rate_micros_h = 629_000
        await control.rounds(10, 10, learner)
        fits = sum(float(n["effective_price_per_hour"]) for n in (await control.get("/v1/fleet"))["nodes"])
        assert fits <= 1.4


@BOTH
async def test_cap_in_total_is_never_passed_and_the_jobs_wait(
    open_world: Opener, provider: FakeProvider, clock: FakeClock
) -> None:
    provider.machines = machines_of(m1=0.9, m2=1.1, m3=1.3)
    async with open_world(max_usd_total="0.30") as control:
        jobs = [await provisioned(control, stop={"steps": 1000}) for _ in range(2)]
        nodes: dict[str, Node_] = {}
        for _ in range(80):
            clock.advance(10)
            for _, learner in jobs:
                await learner.beat()
            leases = {x.instance_id: x for x in await control.leases()}
            for rented in provider.live():
                if rented.instance_id not in nodes and leases[rented.instance_id].state == "booting":
                    nodes[rented.instance_id] = await control.join(rented)
                elif rented.instance_id in nodes:
                    await nodes[rented.instance_id].beat()
            await control.round()
            assert sum(provider.cost().values()) <= 300_000
            if float((await control.get("/v1/fleet"))["caps"]["committed_usd"]) > 0.3:
                raise AssertionError("more is committed than the cap")
        assert provider.live() == []
        assert sum(provider.cost().values()) >= 100_000
        for job_id, _ in jobs:
            assert (await control.job(job_id))["status"] in ("provisioning", "running")
            assert "renting_held" in await control.kinds(job_id)
        held = (await control.get("/v1/fleet"))["caps"]["held"]
        assert len(held) == 2
        assert all("max_usd_total 0.300000" in h["reason"] for h in held)
    rented_before = provider.creates.total()
    async with open_world(max_usd_total="5") as control:
        for job_id, learner in jobs:
            again = Learner(control, job_id)
            again.epoch = learner.epoch
            await again.beat()
        await control.round(1)
        assert provider.creates.total() > rented_before
        assert micros((await control.get("/v1/fleet"))["caps"]["committed_usd"]) < 5_000_000


KEYS = {"vastai": "vk-d34db33f5ecretvast", "runpod": "rpa_d34db33f5ecretrunpod"}


def hostile(request: httpx.Request) -> httpx.Response:
    """Refuses every key, and repeats it wherever an answer has room."""
    key = request.headers["authorization"]
    bare = key.removeprefix("Bearer ")
    if "search" in request.url.path or "bundles" in request.url.path:
        return httpx.Response(502, text=f"<html>{key}</html>")
    if "charges" in request.url.path or "billing" in request.url.path:
        return httpx.Response(200, json={"results": bare, "records": bare, "echo": key})
    return httpx.Response(
        401,
        json={"success": False, "error": "auth_error", "msg": f"invalid user key {bare}", "title": key, "detail": key},
    )


async def test_no_key_is_in_logs_events_answers_or_the_database(
    open_world: Opener, provider: FakeProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    transport = httpx.MockTransport(hostile)
    others = [
        VastAI("vastai", "https://vast.test", KEYS["vastai"], transport=transport, interval_scale=0.0),
        RunPod(api_key=KEYS["runpod"], transport=transport),
    ]
    texts: list[str] = []
    async with open_world(others=others, vastai_api_key=KEYS["vastai"]) as control:
        job_id, learner = await provisioned(control)
        await control.rounds(3, 30, learner)
        assert provider.live_machines() == ["m1"]
        fleet = await control.get("/v1/fleet")
        for name in KEYS:
            assert not row(fleet, name)["usable"], name
        for path in (
            "/v1/fleet",
            "/v1/offers",
            "/v1/cost",
            f"/v1/jobs/{job_id}",
            f"/v1/jobs/{job_id}/events",
            "/metrics",
        ):
            texts.append((await control.http.get(path)).text)
        texts += [repr(control.svc.core.settings), repr(others), repr(control.svc.core.providers)]
        secret = control.svc.core.secrets.key.decode()
    with sqlite3.connect(tmp_path / "test.db") as database:
        texts += list(database.iterdump())
    texts.append(caplog.text)
    whole = "\n".join(texts)
    assert "auth" in whole
    for value in (*KEYS.values(), ADMIN_KEY, WEBHOOK_SECRET, WEBHOOK_SECRET.removeprefix("whsec_"), secret):
        assert value not in whole
