"""When a bill is the last word on a lease, and when it is not yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.protocol.base import micros
from providers.base import Charge
from tests.integration.control.fake_provider import FakeProvider, machines_of
from tests.integration.control.rig import FakeClock, World, world
from tests.integration.control.test_bills import ended, told


@dataclass
class Billing(FakeProvider):
    """Bills for its first instance what the test says: micro-dollars, and up to when."""

    line: tuple[int, float] | None = None
    share: float | None = None
    """Or so much of what it really cost, up to now."""
    read: list[datetime] = field(default_factory=list)
    """From when on it was asked for."""

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """One line, or none."""
        self.read.append(since)
        if self.share is not None:
            self.line = round(self.share * sum(self.cost().values())), self.clock()
        if self.line is None or not self.rented:
            return []
        amount, until = self.line
        rented = self.rented["1"]
        begin = datetime.fromtimestamp(rented.created_at, UTC)
        return [Charge(self.name, "1", rented.label, "gpu", amount, begin, datetime.fromtimestamp(until, UTC))]


@pytest.fixture
def billing(clock: FakeClock) -> Billing:
    """One machine at a dollar an hour."""
    return Billing(clock, machines_of(m1=1.0))


async def over(control: World, billing: Billing, before: tuple[int, float] | None = None) -> str:
    """A job that is over, ten minutes after it began; `before`: what was billed while it ran."""
    job_id = await control.create()
    learner, nodes = await control.running(job_id)
    billing.line = before
    await control.rounds(6, 100, learner, *nodes)
    await ended(control, job_id, learner, nodes)
    return job_id


async def shown(control: World, job_id: str) -> tuple[bool, int]:
    """Whether the bill is final, and what the ledger says."""
    (row,) = (await control.get(f"/v1/jobs/{job_id}/cost"))["leases"]
    return row["provider_bill_final"], micros(row["spent_usd"])


async def test_a_bill_that_disagrees_is_the_last_word_once_it_has_said_the_same_twice(
    tmp_path: Path, database_url: str, clock: FakeClock, billing: Billing
) -> None:
    async with world(tmp_path / "state", database_url, billing, charges_seconds=600) as control:
        # Of an hour that is billed as a whole, while it is not over: it says the same before the end and after it.
        job_id = await over(control, billing, (70_000, clock.now + 7200))
        _, ours = await shown(control, job_id)
        assert ours > 150_000
        assert len(billing.read) >= 2
        assert await shown(control, job_id) == (False, ours), "what it said before the end is no second word"
        billing.line = (80_000, clock.now + 7200)
        await control.round(700)
        assert await shown(control, job_id) == (False, ours), "it has grown"
        await control.round(700)
        assert await shown(control, job_id) == (True, 80_000)


async def test_a_bill_that_never_reached_the_end_corrects_nothing(
    tmp_path: Path, database_url: str, clock: FakeClock, billing: Billing
) -> None:
    async with world(tmp_path / "state", database_url, billing, charges_seconds=3600) as control:
        job_id = await over(control, billing)
        (lease,) = await control.leases()
        assert lease.ended_at is not None
        billing.line = (9, lease.ended_at - 1000)
        _, ours = await shown(control, job_id)
        await control.rounds(8, 3600)
        assert await shown(control, job_id) == (True, ours), "the rest of it may still come"
        (event,) = await told(control, job_id, "bill_differs")
        assert event.data["bill_usd"] == "0.000009"


async def test_that_a_bill_agrees_again_is_told_once(tmp_path: Path, database_url: str, billing: Billing) -> None:
    async with world(tmp_path / "state", database_url, billing, charges_seconds=60) as control:
        job_id = await control.create()
        learner, nodes = await control.running(job_id)
        told_so_far = []
        for share in (1.5, 1.005, 1.005, 1.005):
            billing.share = share
            await control.rounds(4, 50, learner, *nodes)
            told_so_far.append([len(await told(control, job_id, kind)) for kind in ("bill_differs", "bill_agrees")])
        assert told_so_far[0][0] >= 1
        assert [agrees for _, agrees in told_so_far] == [0, 1, 1, 1]


async def test_a_bill_that_does_not_name_a_lease_within_two_days_is_not_asked_for_it_any_more(
    tmp_path: Path, database_url: str, billing: Billing
) -> None:
    async with world(tmp_path / "state", database_url, billing, charges_seconds=3600) as control:
        await over(control, billing)
        await control.round(47 * 3600)
        before = len(billing.read)
        await control.round(2 * 3600)
        await control.rounds(3, 3600)
        assert len(billing.read) == before


async def test_the_bill_is_asked_for_from_the_oldest_lease_on(
    tmp_path: Path, database_url: str, clock: FakeClock, billing: Billing
) -> None:
    billing.machines = machines_of(m1=1.0, m2=1.0)
    async with world(tmp_path / "state", database_url, billing, charges_seconds=600) as control:
        for _ in range(2):
            await control.running(await control.create())
            clock.advance(300)
        first, second = await control.leases()
        assert first.created_at < second.created_at - 200
        await control.round(400)
        assert billing.read[-1].timestamp() <= first.created_at


async def test_a_bill_that_is_not_settled_is_not_read_each_round_once_a_lease_has_ended(
    tmp_path: Path, database_url: str, billing: Billing
) -> None:
    async with world(tmp_path / "state", database_url, billing, charges_seconds=3600) as control:
        await over(control, billing)
        before = len(billing.read)
        await control.rounds(20, 10)
        assert len(billing.read) == before
