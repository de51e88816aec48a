"""For whom a twin is, and which two groups are held against each other."""

from __future__ import annotations

import pytest

from app.storage.models import Node
from tests.integration.control.rig import World
from tests.integration.control.test_twins import answer, chosen, honest, produce, running, twins


async def test_a_twin_is_for_anybody_once_those_it_was_meant_for_are_gone(control: World) -> None:
    _, _, (one, two, three) = await running(control, 3)
    await one.work(1)
    (twin,) = await twins(control)
    wanted, other = sorted((two, three), key=lambda node: node.id not in twin.wanted)
    assert twin.second not in {i.id for i in (await other.work(1))[0]}
    await wanted.leave()
    assert twin.second in {i.id for _ in range(4) for i in (await other.work(1))[0]}


@pytest.mark.parametrize(("compared", "count"), [(0, 1), (16, 0)])
async def test_groups_of_a_node_that_is_new_get_more_twins(control: World, compared: int, count: int) -> None:
    _, _, (one, _) = await running(control, 2, trust={"twin_share": 0.1})
    control.svc.work._draw = lambda: 0.3
    async with control.svc.core.db.write() as session:
        (await session.get_one(Node, one.id)).twins = compared
    await one.work(1)
    assert len(await twins(control)) == count


async def test_two_groups_of_one_node_are_not_held_against_each_other(control: World) -> None:
    """The other one left, and its work was answered by who had the first."""
    _, _, (one, two) = await running(control, 2)
    (first,), _ = await one.work(1)
    assert await answer(one, [first], honest) == [first.id]
    await two.leave()
    (twin,) = await twins(control)
    assert twin.second in await produce(one, chosen, 4)
    (twin,) = await twins(control)
    assert (twin.compared_at, (twin.came or {})["node"]) == (None, one.id)
    assert (await control.node_row(one.id)).twins == 0


async def test_who_took_its_twin_is_meant_for_the_next_one(control: World) -> None:
    _, _, (one, two) = await running(control, 2)
    for count in (1, 2):
        await one.work(1)
        assert [t.wanted for t in await twins(control)] == [[two.id]] * count
        await two.work(1)
