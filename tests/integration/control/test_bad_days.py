"""Machines that get stuck, whatever their provider calls it: each wait has an end, a reason and a beginning."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime

import pytest

from app.storage.models import Lease
from providers.base import (
    Billing,
    EndpointDeprecated,
    Instance,
    Listing,
    Offer,
    OfferQuery,
    Phase,
    RentResult,
    RentSpec,
)
from tests.integration.control.fake_provider import FakeProvider, Outcome, machines_of
from tests.integration.control.rig import FakeClock, World, machines

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


async def booting(control: World, nodes: float = 1.0, **job: object) -> str:
    """A job whose first machine was rented and has not joined."""
    job_id = await control.create(**job)
    await control.ready_learner(job_id, nodes)
    await control.round()
    assert [x.state for x in await control.leases()] == ["booting"] * len(control.provider.live())
    return job_id


@pytest.mark.parametrize("phase", list(Phase), ids=lambda p: p.value)
async def test_no_machine_stays_in_any_of_its_provider_s_states_without_a_node(
    control: World, provider: FakeProvider, phase: Phase
) -> None:
    job_id = await booting(control)
    stuck = provider.rented["1"]
    stuck.phase, stuck.raw_status = phase, f"raw {phase.value}"
    began = control.clock.now
    while provider.rented["1"].gone_at is None:
        (row,) = [n for n in (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"] if n["machine_id"] == "m1"]
        assert row["reason"], "a wait says why"
        assert row["since"] is not None, "and since when"
        assert control.clock.now - began <= 620, f"{phase.value} has no deadline"
        await control.round(10)
    assert control.clock.now - began <= (620 if phase in (Phase.PENDING, Phase.LOADING, Phase.RUNNING) else 30)
    told = [e.message for e in await control.events(job_id) if e.kind in ("preempted", "lease_releasing")]
    assert told
    assert (await control.leases())[0].reason
    await control.round(10)
    assert provider.live_machines() == ["m2"]


@pytest.mark.parametrize("state", ["joining", "warming", "draining"])
async def test_a_node_that_does_not_work_says_why_and_since_when(
    control: World, provider: FakeProvider, state: str
) -> None:
    job_id = await booting(control)
    node = await control.join(provider.live()[0])
    control.clock.advance(30)
    node.state = state
    await node.beat()
    (row,) = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"]
    assert row["state"] == state
    assert row["reason"]
    assert datetime.fromisoformat(row["since"]).timestamp() == control.clock.now


async def test_a_machine_that_is_ended_by_its_provider_is_replaced_at_once(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    await control.running(job_id)
    provider.rented["1"].phase = Phase.TERMINATING
    await control.round(10)
    assert "preempted" in await control.kinds(job_id)
    assert "m2" in provider.live_machines()


async def test_a_machine_that_boots_while_the_list_is_gone_is_given_back_in_time(
    control: World, provider: FakeProvider
) -> None:
    job_id = await booting(control)
    provider.list_error = EndpointDeprecated("retired")
    for _ in range(59):
        await control.round(10)
    assert provider.live_machines() == ["m1"]
    await control.round(20)
    assert provider.rented["1"].gone_at is not None
    (lease,) = await control.leases()
    assert lease.state == "releasing", "accepted, and not seen gone yet"
    assert "no node joined within" in lease.reason
    assert "retired" in lease.reason
    assert provider.creates.total() == 1
    provider.list_error = None
    await control.round(60)
    assert (await control.leases())[0].state == "released"
    kinds = await control.kinds(job_id)
    assert kinds.count("provider_unlisted") == kinds.count("provider_listed") == 1


@pytest.mark.parametrize("outcome", ["unknown_created", "unknown_nothing"])
async def test_an_open_create_call_that_nobody_can_settle_is_told_and_not_rented_again(
    control: World, provider: FakeProvider, outcome: Outcome
) -> None:
    provider.outcomes = deque([outcome])
    provider.incomplete = True
    job_id = await control.create()
    await control.ready_learner(job_id)
    for _ in range(30):
        await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "unknown"
    assert provider.creates.total() == 1
    (told,) = [e for e in await control.events(job_id) if e.kind == "lease_overdue"]
    assert "create call" in told.message
    (row,) = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"]
    assert "outcome is not known" in row["reason"]


async def test_a_release_is_sent_for_as_long_as_it_takes_and_somebody_is_told(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id)
    provider.release_failures = 12
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    await control.round(10)
    await control.round(10)
    since = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"][0]["since"]
    for _ in range(58):
        await control.round(10)
        (lease,) = await control.leases()
        if lease.state == "releasing":
            shown = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"][0]
            assert shown["since"] == since, "failed tries do not make it younger"
    assert lease.state == "released"
    assert provider.release_calls["1"] == 13
    (told,) = [e for e in await control.events(job_id) if e.kind == "lease_overdue"]
    assert "console" in told.message
    assert "instance 1" in told.message
    assert lease.spent_gpu == int(provider.cost()["gpu"])


async def test_a_release_that_was_refused_for_days_keeps_no_other_from_being_sent(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id, nodes=2)
    provider.release_failures = 2
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    await control.round(10)
    await control.round(10)
    first, second = await control.leases()
    assert [x.state for x in (first, second)] == ["releasing", "releasing"]
    async with control.svc.core.db.write() as session:
        (await session.get_one(Lease, first.id)).release_attempts = 5000
    await control.round(60)
    await control.round(10)
    assert provider.live() == []
    assert [x.state for x in await control.leases()] == ["released", "released"]


@dataclass
class Slow(FakeProvider):
    """Takes its destroy calls one by one."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def release(self, instance_id: str) -> None:
        """Hangs until the gate opens."""
        await self.gate.wait()
        await super().release(instance_id)


async def test_slow_destroy_calls_hold_up_no_round_and_are_sent_once(open_world: OpenWorld, clock: FakeClock) -> None:
    slow = Slow(clock, machines(0.2, 0.3), name="slow")
    async with open_world(others=[slow]) as control:
        job_id = await control.create(fleet={"providers": ["slow"]})
        await control.ready_learner(job_id)
        await control.round()
        control.svc.controller.leases.releases.patience_s = 0.05
        slow.fail("1")
        clock.advance(10)
        async with asyncio.timeout(20):
            for _ in range(3):
                await control.svc.loop.round()
                clock.advance(60)
        assert [x.state for x in await control.leases()][:1] == ["releasing"]
        slow.gate.set()
        await control.svc.controller.leases.drain_tasks()
        assert slow.release_calls["1"] == 1
        assert slow.rented["1"].gone_at is not None


async def test_a_machine_that_no_list_ever_shows_is_destroyed_and_not_forgotten(
    control: World, provider: FakeProvider
) -> None:
    provider.listing_lag_s = 100_000
    await booting(control)
    await control.round(10)
    assert provider.live_machines() == ["m1"], "a list may lag"
    for _ in range(4):
        await control.round(10)
    assert provider.release_calls["1"] == 1
    assert provider.rented["1"].gone_at is not None
    first = (await control.leases())[0]
    assert first.state == "released"


async def test_a_machine_that_can_t_run_the_image_is_left_alone_for_an_hour(
    control: World, provider: FakeProvider
) -> None:
    provider.machines = machines_of(m1=0.2)
    job_id = await booting(control)
    provider.fail("1")
    await control.round(10)
    await control.round(10)

    async def excluded() -> str:
        return str((await control.get("/v1/offers", job_id=job_id))["items"][0]["excluded"])

    assert "will not run" in await excluded()
    control.clock.advance(3500)
    assert "will not run" in await excluded()
    control.clock.advance(100)
    assert await excluded() == "None"


@dataclass
class Odd(FakeProvider):
    """Rents another mode than was asked for, offers no ports, and keeps what it was asked for."""

    shown: Billing | None = None
    ports: int = 10
    specs: list[RentSpec] = field(default_factory=list)

    async def search(self, query: OfferQuery) -> list[Offer]:
        """With the ports of the switch."""
        return [replace(o, ports=self.ports) for o in await super().search(query)]

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """Keeps the order."""
        self.specs.append(spec)
        return await super().rent(offer, spec)

    async def list(self) -> Listing:
        """In the mode of the switch."""
        listing = await super().list()
        rows: list[Instance] = [replace(i, billing=self.shown or i.billing) for i in listing.instances]
        return Listing(listing.complete, rows)


async def test_spot_that_turns_out_to_be_on_demand_is_given_back(open_world: OpenWorld, clock: FakeClock) -> None:
    odd = Odd(clock, machines(0.2, 0.3), name="odd", spot=True, shown=Billing.ON_DEMAND)
    async with open_world(others=[odd]) as control:
        job_id = await control.create(fleet={"providers": ["odd"], "interruptible": True})
        await control.ready_learner(job_id)
        await control.round()
        await control.round(10)
        first = (await control.leases())[0]
        assert "billed as on_demand" in first.reason
        assert odd.rented[str(first.instance_id)].gone_at is not None


async def test_a_bid_that_is_billed_dearer_is_given_back(control: World, provider: FakeProvider) -> None:
    provider.spot, provider.billed_factor = True, 1.3
    await booting(control, fleet={"interruptible": True})
    await control.round(10)
    first = (await control.leases())[0]
    assert "quoted" in first.reason
    assert provider.rented["1"].gone_at is not None


@pytest.mark.parametrize(("ports", "asked"), [(0, ()), (1, (7070,))])
async def test_a_host_without_free_ports_is_asked_for_none(
    open_world: OpenWorld, clock: FakeClock, ports: int, asked: tuple[int, ...]
) -> None:
    odd = Odd(clock, machines(0.2), name="odd", ports=ports)
    async with open_world(others=[odd]) as control:
        job_id = await control.create(fleet={"providers": ["odd"]})
        await control.ready_learner(job_id)
        await control.round()
    assert [s.ports for s in odd.specs] == [asked]


async def test_a_silent_node_wakes_the_loop_when_its_time_is_up_and_not_at_the_next_tick(control: World) -> None:
    job_id = await control.create()
    await control.running(job_id)
    news = control.svc.core.signals.subscribe("tick")
    control.clock.advance(60)
    await control.svc.loop.listen_for_silence()
    assert not news.is_set(), "a minute is allowed"
    control.clock.advance(1)
    await control.svc.loop.listen_for_silence()
    assert news.is_set()
    await control.round()
    assert "node_lost" in await control.kinds(job_id)
    news = control.svc.core.signals.subscribe("tick")
    await control.svc.loop.listen_for_silence()
    assert not news.is_set(), "what is lost wakes nobody again"


async def test_a_list_that_took_its_time_says_nothing_of_what_came_after_it_was_asked_for(
    control: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    await booting(control)

    async def long_under_way() -> Listing:
        control.clock.advance(60)
        return Listing(complete=True, instances=[])

    with monkeypatch.context() as slow:
        slow.setattr(provider, "list", long_under_way)
        control.clock.advance(1)
        await control.svc.reconciler.run(provider.name)
    (lease,) = await control.leases()
    assert (lease.state, lease.missing_lists) == ("booting", 0)
