"""Prices of machines that we hold: floors that move, hosts that end or want more, and what the offers say of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from app.storage.models import Event, Lease
from providers.base import Billing, Caps, Transient
from tests.integration.control.fake_provider import FakeProvider, machines_of
from tests.integration.control.rig import FakeClock, World, world
from tests.integration.control.test_hooks import tell

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


async def told(control: World, job_id: str, kind: str) -> list[Event]:
    return [e for e in await control.events(job_id) if e.kind == kind]


async def lease_of(control: World, machine: str) -> Lease:
    return next(x for x in await control.leases() if x.machine_id == machine)


async def bidding(control: World, provider: FakeProvider, **fleet: object) -> str:
    """A job on one interruptible machine, m1, whose provider tells floors."""
    provider.spot = provider.tells_floors = True
    job_id = await control.create(fleet={"interruptible": True, **fleet})
    await control.running(job_id)
    assert provider.live_machines() == ["m1"]
    return job_id


async def test_a_bid_follows_the_floor_that_the_list_shows(control: World, provider: FakeProvider) -> None:
    job_id = await bidding(control, provider)
    assert provider.rented["1"].rate_micros_h == 230_000
    provider.machines[0].price_micros_h = 225_000
    await control.round(10)
    await control.round(1)
    assert provider.bids == [("1", 258_750)], "raised before the floor has reached it"
    assert "floor is $0.225000/h" in (await told(control, job_id, "bid_raised"))[0].message
    provider.machines[0].price_micros_h = 150_000
    await control.round(10)
    await control.round(1)
    assert provider.bids[1:] == [("1", 172_500)], "we pay what we bid"
    assert len(await told(control, job_id, "bid_lowered")) == 1
    lease = await lease_of(control, "m1")
    assert lease.rate_micros_h == lease.agreed_micros_h == 172_500
    assert provider.live_machines() == ["m1"]


async def test_a_floor_that_was_told_counts_for_a_while_whatever_the_list_says(
    open_world: OpenWorld, provider: FakeProvider
) -> None:
    async with open_world(reconcile_seconds=1) as control:
        await bidding(control, provider)
        assert (await tell(control, "0.225", machine_id="m1")).status_code == 202
        for _ in range(4):
            await control.round(2)
            assert (await lease_of(control, "m1")).market_micros_h == 225_000, "its list still shows the old floor"
        assert provider.bids == [("1", 258_750)]
        await control.round(4)
        assert (await lease_of(control, "m1")).market_micros_h == 200_000, "that was a false alarm"


async def test_no_bid_goes_above_the_users_cap(control: World, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.2, m2=0.9)
    await bidding(control, provider, max_price_per_hour="0.24")
    provider.machines[0].price_micros_h = 225_000
    await control.round(10)
    await control.round(1)
    assert provider.bids == [("1", 240_000)]
    provider.machines[0].price_micros_h = 241_000
    await control.round(10)
    await control.round(10)
    assert provider.bids == [("1", 240_000)]


async def test_a_machine_dearer_than_on_demand_is_let_go_and_left_alone(control: World, provider: FakeProvider) -> None:
    provider.on_demand_factor = 1.1
    job_id = await bidding(control, provider)
    assert provider.rented["1"].rate_micros_h == 220_000, "the on-demand price caps the first bid too"
    provider.machines[0].price_micros_h = 221_000
    await control.round(10)
    await control.round(1)
    assert provider.bids == []
    assert provider.live_machines() == ["m1", "m2"], "it stays until its replacement works"
    assert "on-demand price" in (await told(control, job_id, "lease_endangered"))[0].message
    assert "on-demand price" in (await told(control, job_id, "lease_leaving"))[0].message
    await control.join(provider.rented["2"])
    await control.round(1)
    await control.round(46)
    await control.round(1)
    assert provider.live_machines() == ["m2"]
    provider.machines[0].price_micros_h = 100_000
    await control.round(1)
    offers = (await control.get("/v1/offers", job_id=job_id))["items"]
    assert "cooling down: outbid" in next(o for o in offers if o["machine_id"] == "m1")["excluded"]


async def test_a_successor_works_before_the_host_ends_the_contract(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    lease = await lease_of(control, "m1")
    start_s = 60 + (10e9 + 16e9) * 8 / 500e6
    end = control.clock() + 2 * start_s + 120 + 60
    provider.rented["1"].ends_at = end
    await control.rounds(1, 10, node, learner)
    assert provider.live_machines() == ["m1"], "too early"
    await control.rounds(1, 60, node, learner)
    await control.round(1)
    assert provider.live_machines() == ["m1", "m2"]
    assert end - control.clock() > start_s, "in time for the whole start of the next one"
    (warned,) = await told(control, job_id, "lease_endangered")
    assert "its host ends the contract in" in warned.message
    await control.rounds(3, 10, node, learner)
    assert provider.live_machines() == ["m1", "m2"], "it works until the other does"
    second = await control.join(provider.rented["2"])
    await control.rounds(2, 10, node, learner, second)
    assert (await control.node_row(node.id)).drain
    await node.leave()
    await control.rounds(2, 10, learner, second)
    assert provider.live_machines() == ["m2"]
    lease = await lease_of(control, "m1")
    assert not lease.interrupted
    assert lease.ended_at is not None
    assert lease.ended_at < end


async def test_without_a_successor_it_is_drained_right_before_its_end(control: World, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.2)
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    end = control.clock() + 200
    provider.rented["1"].ends_at = end
    await control.rounds(12, 10, node, learner)
    assert not (await control.node_row(node.id)).drain
    await control.rounds(4, 10, node, learner)
    assert (await control.node_row(node.id)).drain
    assert control.clock() < end
    assert len(await told(control, job_id, "lease_endangered")) == 1


async def test_a_successor_that_does_not_work_in_time_keeps_nobody_from_draining(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    end = control.clock() + 770
    provider.rented["1"].ends_at = end
    await control.rounds(14, 50, node, learner)
    assert len(provider.live_machines()) == 2, "its successor boots, and boots"
    assert not (await control.node_row(node.id)).drain
    await control.rounds(2, 10, node, learner)
    assert (await control.node_row(node.id)).drain
    assert control.clock() < end
    assert (await control.job(job_id))["status"] == "provisioning"


async def test_a_leaving_machine_that_is_billed_above_the_users_cap_goes_at_once(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create(fleet={"max_price_per_hour": "0.35"})
    learner, (node,) = await control.running(job_id)
    provider.wish("1", 0.36)
    await control.rounds(2, 10, node, learner)
    assert provider.live_machines() == ["m1", "m2"], "it stays until the other works"
    lease = await lease_of(control, "m1")
    async with control.svc.core.db.write() as session:
        # What was agreed to by hand, in the provider's console.
        (await session.get_one(Lease, lease.id)).agreed_micros_h = 360_000
    provider.rented["1"].rate_micros_h = 360_000
    await control.rounds(1, 10, node, learner)
    assert (await control.node_row(node.id)).drain
    assert "above max_price_per_hour" in (await control.node_row(node.id)).reason


async def test_a_price_increase_that_is_worth_it_is_accepted(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    provider.wish("1", 0.25)
    await control.rounds(1, 10, node, learner)
    (event,) = await told(control, job_id, "price_increase")
    assert "wants $0.250000/h instead of $0.200000/h" in event.message
    await control.rounds(1, 10, node, learner)
    assert provider.accepted == ["1"]
    assert len(await told(control, job_id, "price_increase_accepted")) == 1
    before = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"][0]["rho"]
    await control.rounds(2, 10, node, learner)
    lease = await lease_of(control, "m1")
    assert lease.rate_micros_h == 250_000
    assert "billed $0.250000/h instead of $0.200000/h" in (await told(control, job_id, "rate_changed"))[0].message
    shown = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"][0]
    assert shown["price_per_hour"] == "0.250000"
    assert shown["rho"] >= before
    assert provider.live_machines() == ["m1"], "what was agreed is no broken quote"
    assert len(await told(control, job_id, "price_increase")) == 1


async def test_a_price_increase_over_the_users_cap_is_replaced_and_released(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create(fleet={"max_price_per_hour": "0.35"})
    learner, (node,) = await control.running(job_id)
    provider.wish("1", 0.36)
    await control.rounds(2, 10, node, learner)
    assert provider.accepted == []
    assert provider.live_machines() == ["m1", "m2"]
    second = await control.join(provider.rented["2"])
    await control.rounds(2, 10, node, learner, second)
    await node.leave()
    await control.rounds(2, 10, learner, second)
    assert provider.live_machines() == ["m2"]
    assert "max_price_per_hour" in (await told(control, job_id, "lease_endangered"))[0].message


async def test_a_machine_billed_above_the_users_cap_is_released(control: World, provider: FakeProvider) -> None:
    """CASES 58: within 5 % of its quote, and yet more than the user allows."""
    provider.machines = machines_of(m1=0.2)
    provider.billed_factor = 1.04
    job_id = await control.create(fleet={"max_price_per_hour": "0.205"})
    await control.ready_learner(job_id)
    await control.round()
    await control.round(10)
    await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "released"
    assert "billed $0.208000/h, above max_price_per_hour" in lease.reason
    assert "max_price_per_hour" in (await told(control, job_id, "lease_endangered"))[0].message
    assert provider.live() == []


async def test_a_price_increase_that_others_undercut_is_not_accepted(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    provider.wish("1", 0.9)
    await control.rounds(3, 10, node, learner)
    assert provider.accepted == []
    assert provider.live_machines() == ["m1", "m2"]
    assert "outbid" in (await told(control, job_id, "lease_leaving"))[0].message


async def test_an_increase_that_is_withdrawn_is_forgotten(control: World, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.2)
    job_id = await control.create(fleet={"max_price_per_hour": "0.35"})
    learner, (node,) = await control.running(job_id)
    provider.wish("1", 0.36)
    await control.rounds(1, 10, node, learner)
    assert (await lease_of(control, "m1")).announced_micros_h == 360_000
    provider.wishes.clear()
    await control.rounds(1, 10, node, learner)
    assert (await lease_of(control, "m1")).announced_micros_h is None


async def test_offers_show_every_part_and_whom_they_are_ranked_for(control: World, provider: FakeProvider) -> None:
    provider.machines[0].down_mbps = 50.0
    answer = await control.get("/v1/offers")
    assert answer["ranked_for"]["job_id"] is None
    assert "an assumed job, since none was named" in answer["ranked_for"]["text"]
    assert "8B parameters, 1024 tokens" in answer["ranked_for"]["text"]
    slow = next(o for o in answer["items"] if o["machine_id"] == "m1")
    parts = slow["price_parts"]
    assert set(parts) == {"rent", "disk", "download", "upload", "startup", "total"}
    assert sum(round(float(v) * 1e6) for k, v in parts.items() if k != "total") == round(float(parts["total"]) * 1e6)
    assert slow["start_seconds"] == 60 + 26e9 * 8 / 50e6
    assert slow["rho"] == float(parts["total"]) / slow["mu"]
    assert slow["mu"] == slow["mu_estimate"] * slow["availability"]
    assert slow["mu_source"] == "roofline"
    text = (await control.http.get("/v1/offers", params={"format": "text"})).text
    assert text.startswith("ranked for an assumed job")
    for column in ("RENT", "DOWNLOAD", "UPLOAD", "STARTUP", "LIFE_H", "AVAILABILITY", "MU_SOURCE", "RHO", "EXCLUDED"):
        assert column in text
    job_id = await control.create()
    await control.ready_learner(job_id)
    mine = await control.get("/v1/offers", job_id=job_id)
    assert mine["ranked_for"]["job_id"] == job_id
    assert f"ranked for {job_id}" in mine["ranked_for"]["text"]


async def test_a_machine_that_was_taken_early_is_expected_to_be_again(control: World, provider: FakeProvider) -> None:
    """CASES 66, over the whole service: its own past, then its GPU model's, scores it down."""
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    before = {o["machine_id"]: o for o in (await control.get("/v1/offers", job_id=job_id))["items"]}
    learner, (node,) = await control.running(job_id)
    await control.rounds(3, 60, node, learner)
    provider.pause("1")
    await control.round(10)
    await control.round(10)
    after = {o["machine_id"]: o for o in (await control.get("/v1/offers", job_id=job_id))["items"]}
    assert before["m1"]["life_hours"] == 2.0
    assert after["m1"]["life_hours"] < after["m3"]["life_hours"] < 2.0
    assert after["m1"]["availability"] < after["m3"]["availability"] < before["m3"]["availability"]


async def test_a_bid_is_not_raised_beyond_what_the_budget_can_still_pay(control: World, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=0.2, m2=9.0)
    provider.spot = provider.tells_floors = True
    provider.on_demand_factor = 100
    job_id = await control.create(budget_usd="0.06", fleet={"interruptible": True})
    learner, (node,) = await control.running(job_id)
    provider.machines[0].price_micros_h = 4_000_000
    for _ in range(4):
        await control.rounds(1, 10, node, learner)
    assert provider.bids == [], "at $4.60/h winding down alone costs $0.15"
    view = await control.get(f"/v1/jobs/{job_id}/cost")
    assert float(view["committed_usd"]) <= 0.06


@pytest.mark.parametrize(("budget", "caps"), [("0.15", {}), ("50", {"max_usd_total": "0.15"})], ids=["job", "all"])
async def test_bids_that_are_under_way_count_when_the_next_one_is_to_be_raised(
    open_world: OpenWorld, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, budget: str, caps: dict[str, str]
) -> None:
    """A provider takes its calls seconds apart: what was sent is promised, though nothing bills it yet."""
    provider.machines = machines_of(m1=0.2, m2=0.2, m3=9.0)
    provider.spot = provider.tells_floors = True
    provider.on_demand_factor, provider.download_micros_gb = 100, 0
    asked: list[int] = []
    landed = asyncio.Event()

    async def slow(instance_id: str, bid_micros_h: int) -> None:
        asked.append(bid_micros_h)
        await landed.wait()

    monkeypatch.setattr(provider, "set_bid", slow)
    async with open_world(**caps) as control:
        job_id = await control.create(budget_usd=budget, fleet={"interruptible": True})
        learner, nodes = await control.running(job_id, nodes=2)
        assert sorted(provider.live_machines()) == ["m1", "m2"]
        for machine in provider.machines[:2]:
            machine.price_micros_h = 1_000_000
        for _ in range(3):
            control.clock.advance(10)
            await learner.beat()
            for node in nodes:
                await node.beat()
            await control.svc.loop.round()
        assert asked == [1_150_000], "what may be paid is enough for one of them"
        landed.set()


async def test_a_bid_that_is_not_taken_is_sent_again_and_told_once_it_is(
    open_world: OpenWorld, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def refuse(instance_id: str, bid_micros_h: int) -> None:
        asked.append(bid_micros_h)
        raise Transient("503")

    async with open_world(reconcile_seconds=1) as control:
        job_id = await bidding(control, provider)
        provider.machines[0].price_micros_h = 225_000
        with monkeypatch.context() as away:
            away.setattr(provider, "set_bid", refuse)
            for _ in range(5):
                await control.round(2)
        assert len(asked) >= 3
        assert set(asked) == {258_750}
        assert await told(control, job_id, "bid_raised") == [], "what did not happen is not told"
        assert (await lease_of(control, "m1")).rate_micros_h == 230_000
        await control.round(2)
        await control.round(2)
        assert provider.bids == [("1", 258_750)]
        assert len(await told(control, job_id, "bid_raised")) == 1


async def test_a_bid_of_a_machine_without_a_number_waits_until_it_has_one(
    control: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Providers' numbers are whole: to ask for the one of "" is an error that nobody sends again."""
    provider.spot = True
    provider.outcomes = deque(["unknown_created"])
    provider.listing_lag_s = 25
    take, asked = provider.set_bid, []

    async def strict(instance_id: str, bid_micros_h: int) -> None:
        asked.append(int(instance_id))
        await take(instance_id, bid_micros_h)

    monkeypatch.setattr(provider, "set_bid", strict)
    job_id = await control.create(fleet={"interruptible": True})
    await control.ready_learner(job_id)
    await control.round()
    assert (await lease_of(control, "m1")).state == "unknown"
    assert (await tell(control, "0.25", machine_id="m1")).status_code == 202
    await control.svc.controller.leases.drain_tasks()
    await control.round(10)
    assert asked == []
    await control.round(20)
    await control.round(1)
    assert provider.bids == [("1", 287_500)]
    assert len(await told(control, job_id, "bid_raised")) == 1


async def test_a_bid_that_fails_late_does_not_make_a_newer_one_forgotten(
    open_world: OpenWorld, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    first, second = asyncio.Event(), asyncio.Event()

    async def slow(instance_id: str, bid_micros_h: int) -> None:
        asked.append(bid_micros_h)
        if len(asked) == 1:
            await first.wait()
            raise Transient("503")
        await second.wait()

    async def rounds(count: int) -> None:
        for _ in range(count):
            control.clock.advance(2)
            await control.svc.loop.round()

    async with open_world(reconcile_seconds=1) as control:
        await bidding(control, provider)
        monkeypatch.setattr(provider, "set_bid", slow)
        for floor in (225_000, 240_000):
            provider.machines[0].price_micros_h = floor
            await rounds(2)
        assert asked == [258_750, 276_000]
        first.set()
        await rounds(3)
        assert asked == [258_750, 276_000], "the newer one is under way"
        second.set()


class Listed(FakeProvider):
    """Rents at the market's price in force."""

    @property
    def caps(self) -> Caps:
        """As a cloud's spot machines."""
        return replace(super().caps, change_bid=False, spot_billing=Billing.SPOT_MARKET)


@pytest.mark.parametrize(("interruptible", "shown"), [(True, "0.150000"), (False, "0.600000")])
async def test_a_market_price_that_was_told_counts_until_offers_are_read_anew(
    tmp_path: Path, database_url: str, clock: FakeClock, interruptible: bool, shown: str
) -> None:
    listed = Listed(clock, machines_of(m1=0.2, m2=0.3), spot=True)
    async with world(tmp_path / "state", database_url, listed) as control:
        job_id = await control.create(fleet={"interruptible": interruptible})
        await control.running(job_id)
        clock.advance(0.5)
        assert (await tell(control, "0.15", machine_id="m2")).status_code == 202
        await control.svc.controller.leases.drain_tasks()
        offers = (await control.get("/v1/offers", job_id=job_id))["items"]
        assert next(o for o in offers if o["machine_id"] == "m2")["price_per_hour"] == shown
        assert listed.bids == []
