"""What the provider soak found: a last look that fails, a machine that never ran, a bill that knows better."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from app.fleet import money
from app.storage.models import Lease
from providers.base import Instance, Phase, Transient
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import FakeClock, World, machines, world

Open = Callable[..., AbstractAsyncContextManager[World]]


class Blind(FakeProvider):
    """Shows nothing of a single instance."""

    async def get(self, instance_id: str) -> Instance | None:
        """Never answers."""
        raise Transient("show: the connection broke")


@pytest.fixture
async def blind(tmp_path: Path, database_url: str, clock: FakeClock) -> AsyncIterator[World]:
    async with world(tmp_path / "state", database_url, Blind(clock, machines(0.2, 0.3))) as made:
        yield made


async def test_a_look_that_fails_keeps_nobody_from_destroying(blind: World) -> None:
    """Each failed look used to count as a failed release: machines stayed for as long as `show` did not answer."""
    blind.provider.boot_s = 300
    job_id = await blind.create()
    await blind.ready_learner(job_id)
    await blind.round()
    assert blind.provider.live_machines() == ["m1"]
    await blind.http.post(f"/v1/jobs/{job_id}/cancel")
    await blind.round(5)
    assert blind.provider.live_machines() == []
    assert "release_failed" not in await blind.kinds(job_id)


async def test_a_machine_that_was_outbid_before_it_ran_costs_its_disk_only(
    control: World, provider: FakeProvider
) -> None:
    """Its `started_at` is there all the same: billed from it, the whole time until the release was GPU time."""
    provider.boot_s = 5
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    rented = provider.live()[0]
    rented.phase, rented.raw_status, rented.stopped_at = Phase.PAUSED, "stopped", rented.runs_at
    provider.release_failures = 3
    for _ in range(8):
        await control.round(30)
    lease = next(x for x in await control.leases() if x.machine_id == "m1")
    assert lease.ended_at is not None
    assert lease.ended_at - lease.created_at > 60
    assert lease.spent_gpu == 0
    assert lease.spent_disk > 0


async def test_the_final_bill_is_what_the_ledger_says_in_the_end(control: World) -> None:
    job_id = await control.create()
    await control.running(job_id)
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await control.rounds(6, 20)
    (lease,) = await control.leases()
    entries = len(await control.ledger())
    bill = {"gpu": lease.spent_gpu - 700, "disk": lease.spent_disk + 20}
    for _ in range(2):
        async with control.svc.core.db.write() as session:
            row = await session.get_one(Lease, lease.id)
            money.settle(session, row, bill, control.svc.core.metrics)
    ledger = await control.ledger()
    assert {k: sum(e.micros for e in ledger if e.kind == k) for k in ("gpu", "disk")} == bill
    assert [(e.kind, e.micros, e.end - e.start) for e in ledger[entries:]] == [("gpu", -700, 0.0), ("disk", 20, 0.0)]
