"""What a node may hand over, and what is left to it: nothing that was accepted, nothing too old, no new time."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from app.protocol.trajectory import encode
from app.protocol.work import UploadSlot
from app.storage.models import ExamItem, Lease
from tests.integration.control.rig import World
from tests.integration.control.test_exams import exam, started
from tests.integration.control.test_partials import _begun, _hand_back, _put, _two


async def test_a_group_that_was_accepted_is_not_taken_as_one_that_has_begun(control: World) -> None:
    """It would be answered, and trained on, twice."""
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, _ = await node.work(1)
    rows = _begun(node, items)
    slot = (await node.post("uploads", {"policy_version": 0})).json()

    place, data = UploadSlot.model_validate(slot), encode(node.rollouts(items))
    await node.put(place, data)
    assert (await node.commit(place, data, [items[0].id])).json()["accepted"] == [items[0].id]
    assert (await _hand_back(node, rows)).json() == {"taken": []}
    assert [(i.status, i.partial_key) for i in await control.items(job_id)] == [("accepted", None)]
    assert not (await control.node_row(node.id)).drain
    assert [ref.work_items for ref in await learner.poll()] == [[items[0].id]]


@pytest.mark.parametrize(("steps", "taken"), [(1, True), (2, False)])
async def test_a_beginning_is_taken_while_it_may_still_be_trained_on(control: World, steps: int, taken: bool) -> None:
    job_id = await control.create(staleness_budget=1, stop={"steps": 50})
    learner, (node, _) = await control.running(job_id, nodes=2)
    items, _ = await node.work(1)
    for _ in range(steps):
        await learner.train([])
    assert (await _hand_back(node, _begun(node, items))).json() == {"taken": [items[0].id] if taken else []}


async def test_who_hands_over_twice_or_was_told_to_drain_has_no_new_time(control: World) -> None:
    job_id = await control.create()
    _, (node, _) = await control.running(job_id, nodes=2)
    first, second = await _two(node)
    async with control.svc.core.db.write() as session:
        lease = await session.get_one(Lease, (await control.node_row(node.id)).lease_id)
        await control.svc.nodes.retire(session, lease, "it is too dear")
    began = control.clock()
    for item in (first, second):
        control.clock.advance(5)
        assert (await _hand_back(node, _begun(node, [item]))).json() == {"taken": [item.id]}
    row = await control.node_row(node.id)
    assert (row.state_since, {x.id: x.reason for x in await control.leases()}[row.lease_id]) == (
        began,
        "it is too dear",
    )


async def test_who_begins_anew_and_hands_over_alone_answers_for_what_it_wrote(control: World) -> None:
    job_id = await control.create()
    _, (one, two, _) = await control.running(job_id, nodes=3)
    items, _ = await one.work(1)
    await _hand_back(one, _begun(one, items))
    got, _ = await two.work(1)
    assert (await _hand_back(two, _begun(two, got, completion_ids=[7]))).json() == {"taken": [items[0].id]}
    (row,) = [i for i in await control.items(job_id) if i.id == items[0].id]
    assert (row.written_by, row.partial_node) == ([two.id], two.id)


async def test_held_out_prompts_that_are_named_along_are_asked_of_others(control: World) -> None:
    """There is nothing of them to go on from."""
    _, _, node = await started(control)
    items, _ = await node.work(1)
    asked, _ = await exam(node)
    assert asked[0].split == "heldout"
    assert items[0].split == "train"
    body = await _put(node, _begun(node, items, span_versions=[2]))
    body["work_items"] += [i.id for i in asked]
    assert (await node.post("partials", body)).json() == {"taken": [items[0].id]}
    async with control.svc.core.db.read() as session:
        found = {i.id: (i.status, i.node_id) for i in await session.scalars(select(ExamItem))}
    assert {found[i.id] for i in asked} == {("pending", None)}
