"""Ways in which a lease could go on costing though nobody watches it any more."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.choice import Choice
from app.protocol.job import JobStatus
from app.storage.models import Job
from providers.base import Balance, Billing, Listing, Offer, OfferQuery, Phase, RentResult, RentSpec
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import FakeClock, World, machines

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


async def a_choice(control: World, provider: FakeProvider) -> Choice:
    """The cheapest machine, as a decision takes it."""
    offer: Offer = (await provider.search(OfferQuery(billing=Billing.ON_DEMAND)))[0]
    return Choice(offer, offer.compute_micros_h, offer.compute_micros_h, 6.0)


@pytest.mark.parametrize("end", ["cancel", "pause"])
async def test_what_was_decided_is_not_rented_for_a_job_that_was_ended_meanwhile(
    control: World, provider: FakeProvider, end: str
) -> None:
    job_id = await control.create()
    learner, nodes = await control.running(job_id)
    choice = await a_choice(control, provider)
    assert (await control.http.post(f"/v1/jobs/{job_id}/{end}")).status_code == 202
    if end == "cancel":
        await learner.done("finished")
        await nodes[0].leave()
        await control.rounds(3, 10)
        assert (await control.job(job_id))["status"] == "cancelled"
    # The decision was made before, and its renting comes only now.
    assert await control.svc.controller.leases.rent(job_id, [choice]) == []
    await control.svc.controller.leases.drain_tasks()
    assert provider.creates.total() == 1


async def test_a_machine_that_turns_up_for_a_job_that_is_over_is_given_back(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    async with control.svc.core.db.write() as session:
        job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
        job.status = JobStatus.CANCELLED
    await control.round(10)
    await control.round(10)
    assert provider.live() == []
    assert [x.state for x in await control.leases()] == ["released"]


async def test_an_intent_whose_create_call_fell_over_is_settled_like_any_other(
    control: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> dict[str, str]:
        raise OperationalError("the disk is full", None, Exception())

    monkeypatch.setattr("app.fleet.bootstrap.environment", broken)
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    assert [x.state for x in await control.leases()] == ["intent"]
    monkeypatch.undo()
    for _ in range(10):
        await control.round(10)
    first = (await control.leases())[0]
    assert first.state == "refused", "nothing was made, and the list says so"
    assert provider.live_machines() == ["m1"] or provider.live_machines() == ["m2"]


async def test_a_second_machine_with_the_label_of_a_lease_is_destroyed(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.running(job_id)
    first = provider.live()[0]
    twin = provider.add_foreign(first.label)
    node = (await control.leases())[0]
    for _ in range(3):
        await control.round(10)
    assert twin.gone_at is not None
    assert first.gone_at is None, "the lease's own machine stays"
    again = (await control.leases())[0]
    assert (again.instance_id, again.rate_micros_h) == (node.instance_id, node.rate_micros_h)
    assert "orphan_destroyed" in await control.kinds()


@dataclass
class Gone(FakeProvider):
    """Another provider, which the settings may name or not."""

    extra: list[str] = field(default_factory=list)


async def test_a_lease_at_a_provider_that_the_settings_no_longer_name_is_told_of(
    open_world: OpenWorld, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Gone(clock, machines(0.2), name="gone")
    async with open_world(others=[gone]) as control:
        job_id = await control.create(fleet={"providers": ["gone"]})
        await control.ready_learner(job_id)
        await control.round()
        assert [r.phase or Phase.RUNNING for r in gone.live()] == [Phase.RUNNING]
        control.others = []
        await control.restart()
        await control.http.post(f"/v1/jobs/{job_id}/cancel")
        for _ in range(3):
            await control.round(10)
        (told,) = [e for e in await control.events(job_id) if e.kind == "lease_out_of_reach"]
        assert "ECHO2_PROVIDERS" in told.message
        assert "instance 1" in told.message
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@dataclass
class Hanging(FakeProvider):
    """Takes a call and never answers."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def _hang(self) -> None:
        await self.answers.wait()

    async def list(self) -> Listing:
        """Hangs."""
        await self._hang()
        return await super().list()

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Hangs."""
        await self._hang()
        return await super().search(query)

    async def balance(self) -> Balance:
        """Hangs."""
        await self._hang()
        return await super().balance()


async def test_a_provider_that_does_not_answer_holds_up_neither_budgets_nor_releases_elsewhere(
    open_world: OpenWorld, clock: FakeClock, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.accounts.ANSWER_S", 0.05)
    dumb = Hanging(clock, machines(9.0), name="dumb")
    dumb.answers.set()
    provider.download_micros_gb = 0
    async with open_world(others=[dumb]) as control:
        job_id = await control.create(budget_usd="0.03", fleet={"max_nodes": 1})
        learner, (node,) = await control.running(job_id)
        control.svc.loop.patience_s = control.svc.market.patience_s = 0.05
        dumb.answers.clear()
        async with asyncio.timeout(20):
            for _ in range(50):
                clock.advance(10)
                await node.beat()
                await learner.beat()
                await control.svc.loop.round()
                if (await control.job(job_id))["status"] == "draining" and not provider.live():
                    break
        assert provider.live() == []
        assert provider.cost()["gpu"] + provider.cost()["disk"] < 30_000
        dumb.answers.set()


async def test_a_job_that_trips_over_a_defect_keeps_no_other_job_from_its_turn(
    control: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await control.create()
    second = await control.create()
    turns: list[str] = []
    tick = control.svc.controller.tick

    async def tripping(job_id: str) -> None:
        turns.append(job_id)
        if job_id == first:
            raise ZeroDivisionError("float division by zero")
        await tick(job_id)

    monkeypatch.setattr(control.svc.controller, "tick", tripping)
    await control.round(10)
    assert turns == [first, second]
    assert "float division by zero" in caplog.text
    assert control.svc.loop.last_round_at == control.clock.now
    caplog.clear()


async def test_a_wake_up_that_fails_is_not_the_last_one(
    control: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns: list[int] = []
    twice = asyncio.Event()

    async def live_jobs() -> list[str]:
        turns.append(1)
        if len(turns) == 2:
            twice.set()
        raise OperationalError("the database is locked", None, Exception())

    loop = control.svc.loop
    await loop.start()
    try:
        monkeypatch.setattr(loop, "_live_jobs", live_jobs)
        async with asyncio.timeout(5):
            while not twice.is_set():
                control.svc.core.signals.notify("tick")
                await asyncio.sleep(0.01)
    finally:
        await loop.stop()
    caplog.clear()


async def test_a_create_call_that_had_to_queue_is_not_taken_for_one_that_left_nothing(
    open_world: OpenWorld, clock: FakeClock
) -> None:
    queued = Queued(clock, machines(0.2), name="queued", listing_lag_s=15, outcomes=deque(["unknown_created"]))
    async with open_world(others=[queued]) as control:
        job_id = await control.create(fleet={"providers": ["queued"]})
        await control.ready_learner(job_id)
        await control.round()
        assert [x.state for x in await control.leases()] == ["unknown"]
        await control.round(5)
        await control.round(15)
        assert [x.state for x in await control.leases()] == ["booting"]
        assert "lease_ghost" not in await control.kinds(job_id)


@dataclass
class Queued(FakeProvider):
    """Takes its creates one by one: this one waited for two hundred seconds."""

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """After the others."""
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(200)
        return await super().rent(offer, spec)


async def test_a_stray_is_given_back_without_a_second_connection(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await control.create()
    await control.running(job_id)
    db = control.svc.core.db
    async with db.write() as session:
        (await session.scalars(select(Job).where(Job.id == job_id))).one().status = JobStatus.CANCELLED
    reading: list[int] = []
    read, write = db.read, db.write

    @asynccontextmanager
    async def counted_read() -> AsyncIterator[AsyncSession]:
        reading.append(1)
        async with read() as session:
            yield session
        reading.pop()

    @asynccontextmanager
    async def alone() -> AsyncIterator[AsyncSession]:
        assert not reading, "writers that wait would keep readers' connections"
        async with write() as session:
            yield session

    monkeypatch.setattr(db, "read", counted_read)
    monkeypatch.setattr(db, "write", alone)
    await control.svc.loop.strays.look()
    assert [x.state for x in await control.leases()] == ["releasing"]
