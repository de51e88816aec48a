"""A provider whose offers are pools: a job rents as many machines of the cheapest as it needs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from app.storage.models import Cooldown
from providers.base import NoCapacity
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture(autouse=True)
def pools(provider: FakeProvider) -> None:
    """m1 at 0.20 an hour to m4 at 0.50 are pools."""
    provider.pools = True


async def test_all_machines_come_from_the_cheapest_pool(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, nodes = await control.running(job_id, nodes=3)
    assert Counter(provider.live_machines()) == {"m1": len(nodes)}
    assert len(nodes) >= 3
    await control.rounds(3, 10, learner, *nodes)
    assert provider.creates.total() == len(nodes), "what it has is enough"
    rows = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"]
    assert {row["machine_id"] for row in rows} == {"m1"}
    assert len({row["lease_id"] for row in rows}) == len(nodes)


async def test_a_pool_that_runs_dry_is_left_alone_once_and_the_next_one_gives_the_rest(
    control: World, provider: FakeProvider
) -> None:
    provider.refusal = NoCapacity("no more of these")
    provider.outcomes = deque(["created", "refuse", "refuse", "refuse"])
    job_id = await control.create()
    await control.ready_learner(job_id, nodes=4)
    for _ in range(3):
        await control.round(10)
    found = Counter(provider.live_machines())
    assert found["m1"] == 1
    assert found["m2"] >= 3
    async with control.svc.core.db.read() as session:
        row = await session.get_one(Cooldown, ("marketplace", "m1"))
    assert row.count == 1, "three that were refused in one go are one trouble"


async def test_a_pool_that_takes_a_machine_back_gives_no_successor_at_once(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, nodes = await control.running(job_id, nodes=2)
    assert set(provider.live_machines()) == {"m1"}
    provider.pause(provider.live()[0].instance_id)
    await control.rounds(3, 10, learner, *nodes[1:])
    assert "m2" in provider.live_machines()


async def test_a_job_that_a_cap_holds_below_its_target_is_told_so_with_a_pool_too(
    open_world: OpenWorld, provider: FakeProvider
) -> None:
    provider.machines = provider.machines[:1]
    async with open_world(max_usd_per_hour="0.75") as control:
        job_id = await control.create()
        await control.ready_learner(job_id, nodes=4)
        for _ in range(2):
            await control.round(10)
        assert provider.live_machines() == ["m1", "m1"]
        (held,) = [e for e in await control.events(job_id) if e.kind == "renting_held"]
        assert "max_usd_per_hour" in held.message
