"""Nodes that drain: by our word or by their own, they are gone within a bound, whatever they go on to say."""

from __future__ import annotations

import pytest

from app.fleet.roster import DRAIN_S
from app.storage.models import Lease
from tests.integration.control.rig import World


async def test_a_node_that_says_that_it_drains_and_stays_is_given_back(control: World) -> None:
    """It gets no work and is no capacity: what takes its place is rented beside it."""
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    node.state = "draining"
    began = control.clock()
    while (await control.node_row(node.id)).state != "gone":
        assert control.clock() - began <= DRAIN_S + 10
        await control.rounds(1, 5, node, learner)
    assert control.clock() - began > DRAIN_S
    said = {x.id: (x.state, x.reason) for x in await control.leases()}[(await control.node_row(node.id)).lease_id]
    assert said == ("releasing", "its node said that it drains, and did not leave")
    await node.beat()
    assert node.directives["shutdown"]


@pytest.mark.parametrize("says", ["warming", "active", "joining", "lost"])
async def test_a_node_that_is_to_drain_has_no_more_time_for_what_it_says(control: World, says: str) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    async with control.svc.core.db.write() as session:
        lease = await session.get_one(Lease, (await control.node_row(node.id)).lease_id)
        await control.svc.nodes.retire(session, lease, "it is too dear")
    for turn in range(12):
        node.state = says if turn % 2 else "draining"
        await control.rounds(1, 5, node, learner)
    row = await control.node_row(node.id)
    assert (row.state, row.reason) == ("gone", "it is too dear")


@pytest.mark.parametrize("by_itself", [False, True])
async def test_a_job_ends_though_a_node_drains_and_drains(control: World, by_itself: bool) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    if by_itself:
        node.state = "draining"
        await control.round(5)
        await node.beat()
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    for turn in range(8):
        node.state = "warming" if turn % 2 and not by_itself else "draining"
        await control.rounds(1, 4, node)
    assert (await control.job(job_id))["status"] == "cancelled"
    assert {x.state for x in await control.leases()} == {"released"}
    assert control.provider.live() == []


async def test_the_time_of_a_node_that_drains_by_itself_does_not_begin_anew_when_it_is_told_to(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    node.state = "draining"
    await node.beat()
    since = control.clock()
    await control.rounds(3, 10, node, learner)
    async with control.svc.core.db.write() as session:
        lease = await session.get_one(Lease, (await control.node_row(node.id)).lease_id)
        await control.svc.nodes.retire(session, lease, "it is too dear")
    await node.beat()
    assert (node.directives["drain"], node.directives["reason"]) == (True, "it is too dear")
    row = await control.node_row(node.id)
    assert (row.state, row.state_since, row.reason) == ("draining", since, "")
