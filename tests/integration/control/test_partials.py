"""Groups that change hands: handed back begun, finished by another node, thrown away when they are too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from blake3 import blake3
from sqlalchemy import select

from app.protocol.partial import encode_partial
from app.protocol.trajectory import Rollout, encode
from app.protocol.work import UploadSlot, WorkItem
from app.storage.models import GroupPrint, Node
from app.storage.models import WorkItem as WorkItemRow
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import Node_, World


def _begun(node: Node_, items: Sequence[WorkItem], **changes: Any) -> list[Rollout]:
    """The first sample of each group, cut after one token; of the second nothing."""
    cut = {"completion_ids": [4], "logprobs": [-0.1], "finish_reason": "abort", "reward": 0.0}
    return [replace(r, **{**cut, **changes}) for r in node.rollouts(items) if r.sample_index == 0]


async def _two(node: Node_) -> list[WorkItem]:
    """Two groups."""
    return [item for _ in range(2) for item in (await node.work(1))[0]]


async def _slot(node: Node_) -> UploadSlot:
    answer = await node.post("uploads", {"policy_version": node.version})
    assert answer.status_code == 200, answer.text
    return UploadSlot.model_validate(answer.json())


async def _put(node: Node_, rows: Sequence[Rollout]) -> dict[str, Any]:
    """Put a partial file; the body of the request that hands it in."""
    slot, data = await _slot(node), encode_partial(rows)
    await node.put(slot, data)
    items = list(dict.fromkeys(r.work_item for r in rows))
    return {"key": slot.key, "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": items}


async def _hand_back(node: Node_, rows: Sequence[Rollout], **changes: Any) -> httpx.Response:
    return await node.post("partials", {**await _put(node, rows), **changes})


async def _finish(node: Node_, items: Sequence[WorkItem], rows: Sequence[Rollout]) -> httpx.Response:
    slot, data = await _slot(node), encode(rows)
    await node.put(slot, data)
    return await node.commit(slot, data, [i.id for i in items])


async def _prints(world: World) -> list[str]:
    async with world.svc.core.db.read() as session:
        return list(await session.scalars(select(GroupPrint.work_item)))


def _there(world: World, key: str) -> bool:
    return world.svc.core.objects.head(key) is not None


@BOTH
async def test_a_begun_group_goes_first_to_another_node_with_what_there_is_of_it(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    items = await _two(one)
    answer = await _hand_back(one, _begun(one, items))
    assert answer.json() == {"taken": [i.id for i in items]}
    assert [(i.status, i.partial_node, i.partial_version, i.partial_tokens) for i in await control.items(job_id)] == [
        ("pending", one.id, 0, 1)
    ] * 2
    got = await _two(two)
    assert [i.id for i in got] == [i.id for i in items]
    partial = got[0].partial
    assert partial is not None
    data = (await control.http.get(partial.url)).content
    assert (len(data), blake3(data).hexdigest()) == (partial.size, partial.blake3)
    done = await _finish(two, got, two.rollouts(got))
    assert done.json()["accepted"] == [i.id for i in items]
    refs = await learner.poll()
    assert {n: list(w) for ref in refs for n, w in ref.written_by.items()} == {i.id: [one.id] for i in items}
    assert refs[0].node_id == two.id
    assert not _there(control, partial.key)
    (told,) = [e for e in await control.events(job_id) if e.kind == "groups_handed_back"]
    assert told.message == "2 groups with 2 tokens wait for a node that goes on with them"
    gone = await control.node_row(one.id)
    assert (gone.drain, gone.state_since) == (True, control.clock()), "its time to end begins now"
    assert "its node has handed its work over" in {x.reason for x in await control.leases() if x.id == gone.lease_id}


async def test_the_object_stays_until_the_last_of_its_groups_is_done(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    items = await _two(one)
    await _hand_back(one, _begun(one, items))
    got = await _two(two)
    assert got[0].partial is not None
    await _finish(two, got[:1], two.rollouts(got[:1]))
    assert _there(control, got[0].partial.key)
    await _finish(two, got[1:], two.rollouts(got[1:]))
    assert not _there(control, got[0].partial.key)


async def test_who_samples_a_begun_group_from_scratch_answers_for_it_alone(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    await _hand_back(one, _begun(one, items, logprobs=[-0.4]))
    got, _ = await two.work(1)
    assert (await _finish(two, got, two.rollouts(got))).json()["accepted"] == [items[0].id]
    assert [ref.written_by for ref in await learner.poll()] == [{}]
    assert [(i.partial_node, i.written_by) for i in await control.items(job_id) if i.id == items[0].id] == [(None, [])]


async def test_a_group_that_is_sampled_again_has_nobody_who_began_it(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    await _hand_back(one, _begun(one, items))
    got, _ = await two.work(1)
    assert (await _finish(two, got, two.rollouts(got))).json()["accepted"] == [items[0].id]
    # Whoever withdraws it: it waits again, and nothing of it is left.
    async with control.svc.core.db.write() as session:
        item = await session.get_one(WorkItemRow, items[0].id)
        item.status, item.node_id, item.trajectory_seq = "pending", None, None
    again, _ = await two.work(1)
    assert (again[0].id, again[0].partial) == (items[0].id, None)
    assert (await _finish(two, again, two.rollouts(again))).json()["accepted"] == [items[0].id]
    assert [ref.written_by for ref in await learner.poll()] == [{}]


async def test_who_replaces_a_beginning_that_was_taken_over_still_answers_for_it(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    slot, data = await _slot(one), encode_partial(_begun(one, items))
    await one.put(slot, data)
    body = {"key": slot.key, "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [items[0].id]}
    assert (await one.post("partials", body)).json() == {"taken": [items[0].id]}
    got, _ = await two.work(1)
    await one.put(slot, encode_partial(_begun(one, items, completion_ids=[7])))
    assert (await _finish(two, got, two.rollouts(got))).json()["accepted"] == [items[0].id]
    assert [ref.written_by for ref in await learner.poll()] == [{items[0].id: [one.id]}]


async def test_a_group_may_change_hands_more_than_once_and_its_oldest_token_counts(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (one, two, three) = await control.running(job_id, nodes=3)
    items, _ = await one.work(1)
    await _hand_back(one, _begun(one, items))
    await learner.train([])
    await learner.publish(1)
    two.version = 1
    got, _ = await two.work(1)
    longer = _begun(two, got, completion_ids=[4, 5], logprobs=[-0.1, -0.2], span_versions=[0, 1], span_starts=[0, 1])
    first = got[0].partial
    assert first is not None
    assert (await _hand_back(two, longer)).json() == {"taken": [items[0].id]}
    assert not _there(control, first.key)
    assert await one.work(1) == ([], None), "who has handed over gets no more work"
    again, _ = await three.work(1)
    assert [i.id for i in again] == [items[0].id]
    whole = [
        replace(r, completion_ids=[4, 5, 6], logprobs=[-0.1, -0.2, -0.3], span_versions=[0, 1], span_starts=[0, 1])
        for r in three.rollouts(again)
    ]
    assert (await _finish(three, again, whole)).json()["accepted"] == [items[0].id]
    assert [ref.written_by for ref in await learner.poll()] == [{items[0].id: [one.id, two.id]}]
    assert [i.version for i in await control.items(job_id) if i.id == items[0].id] == [0]


async def test_a_beginning_of_which_two_nodes_made_nothing_is_given_to_no_third(control: World) -> None:
    """It may be what they died of."""
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    body = await _put(one, _begun(one, items))
    assert (await one.post("partials", body)).json() == {"taken": [items[0].id]}
    for _ in range(2):
        got, _ = await two.work(1)
        assert (got[0].id, got[0].partial is None) == (items[0].id, False)
        left = got[0].deadline_s
        while left > -1:
            await control.rounds(1, 20, two, learner)
            left -= 20
    got, _ = await two.work(1)
    assert (got[0].id, got[0].partial) == (items[0].id, None)
    assert not _there(control, body["key"])
    assert (await _finish(two, got, two.rollouts(got))).json()["accepted"] == [items[0].id]
    assert [ref.written_by for ref in await learner.poll()] == [{}]


async def test_a_beginning_too_old_to_be_trained_on_is_thrown_away_and_counted(control: World) -> None:
    job_id = await control.create(staleness_budget=1, stop={"steps": 50})
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    body = await _put(one, _begun(one, items))
    assert (await one.post("partials", body)).json() == {"taken": [items[0].id]}
    for step in (1, 2):
        await learner.train([])
        await learner.publish(step)
    two.version = 2
    got, _ = await two.work(1)
    assert [(i.id, i.partial) for i in got] == [(items[0].id, None)]
    assert not _there(control, body["key"])
    text = (await control.http.get("/metrics")).text
    assert f'echo2_tokens_wasted_total{{job="{job_id}",reason="stale_partial"}} 1.0' in text
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["tokens_wasted"] == {"stale_partial": 1}
    assert (await _finish(two, got, two.rollouts(got))).json()["accepted"] == [items[0].id]
    assert [i.written_by for i in await control.items(job_id) if i.id == items[0].id] == [[]]


async def test_a_beginning_that_comes_too_late_is_not_taken(control: World) -> None:
    job_id = await control.create(staleness_budget=1, stop={"steps": 50})
    learner, (one, _) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    await learner.train([])
    await learner.train([])
    body = await _put(one, _begun(one, items))
    assert (await one.post("partials", body)).json() == {"taken": []}
    assert [(i.status, i.partial_key) for i in await control.items(job_id)] == [("pending", None)]
    assert not _there(control, body["key"])


async def test_what_is_no_longer_the_nodes_is_not_taken_and_a_repeated_request_is_answered_again(
    control: World,
) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    body = await _put(one, _begun(one, items))
    for _ in range(2):
        assert (await one.post("partials", body)).json() == {"taken": [items[0].id]}
    got, _ = await two.work(1)
    assert got[0].id == items[0].id
    assert (await one.post("partials", body)).json() == {"taken": [items[0].id]}
    other = await _put(one, _begun(one, items))
    assert (await one.post("partials", other)).json() == {"taken": []}
    assert [(i.node_id, i.partial_key) for i in await control.items(job_id)] == [(two.id, body["key"])]


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ({"finish_reason": "bored"}, "finish_reason"),
        ({"logprobs": [0.5]}, "logprobs"),
        ({"span_versions": [7]}, "future_version"),
        ({"prompt_index": 49}, "wrong_prompt"),
        ({"sample_index": 2}, "incomplete_group"),
        ({"work_item": "job_x-0"}, "foreign_work_item"),
    ],
)
async def test_a_bad_partial_file_is_refused_and_its_groups_are_done_anew(
    control: World, spoiled: dict[str, Any], reason: str
) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    items, _ = await node.work(1)
    answer = await _hand_back(node, _begun(node, items, **spoiled), work_items=[items[0].id])
    assert (answer.status_code, answer.json()["reason"]) == (422, reason)
    assert [(i.status, i.partial_key) for i in await control.items(job_id)] == [("pending", None)]
    assert (await control.node_row(node.id)).files_refused == 1


async def test_a_beginning_of_copies_is_refused_where_it_comes_from(control: World) -> None:
    job_id = await control.create(batch={"group_size": 8})
    _, nodes = await control.running(job_id)
    items, _ = await nodes[0].work(1)
    rows = [replace(r, logprobs=[-3.0, -3.0], reward=0.0) for r in nodes[0].rollouts(items)]
    assert (await _hand_back(nodes[0], rows)).json()["reason"] == "copied"
    assert [(i.status, i.partial_key) for i in await control.items(job_id)] == [("pending", None)]


async def test_who_finishes_what_another_node_replayed_is_not_taken_for_the_cheat(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner = await control.ready_learner(job_id, 2, train_prompts=1)
    await control.round()
    await control.round(10)
    one, two, *_ = [await control.join(r) for r in control.provider.live() if r.env]

    def long(items: Sequence[WorkItem], reward: float) -> list[Rollout]:
        return [
            replace(r, completion_ids=[r.sample_index, *range(9)], logprobs=[-2.0] * 10, reward=reward)
            for r in one.rollouts(items)
        ]

    first, _ = await one.work(1)
    assert (await _finish(one, first, long(first, 1.0))).json()["accepted"] == [first[0].id]
    second, _ = await one.work(1)
    cut = [
        replace(r, completion_ids=r.completion_ids[:9], logprobs=[-2.0] * 9, finish_reason="abort")
        for r in long(second, 0.0)
    ]
    body = await _put(one, cut)
    assert (await one.post("partials", body)).json() == {"taken": [second[0].id]}
    got, _ = await two.work(1)
    assert (await _finish(two, got, long(got, 1.0))).json()["reason"] == "replayed_begun"
    # The next one does not go on from it.
    assert not _there(control, body["key"])
    again, _ = await two.work(1)
    assert (again[0].id, again[0].partial) == (second[0].id, None)
    assert (await _finish(two, again, two.rollouts(again))).json()["accepted"] == [second[0].id]
    assert sum(len(ref.work_items) for ref in await learner.poll()) == 2


async def test_a_beginning_of_what_was_accepted_before_is_refused_where_it_comes_from(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    await control.ready_learner(job_id, 2, train_prompts=1)
    await control.round()
    await control.round(10)
    one, *_ = [await control.join(r) for r in control.provider.live() if r.env]
    unlikely = {"completion_ids": [4, 5, 6], "logprobs": [-10.0] * 3}
    first, _ = await one.work(1)
    rows = [replace(r, completion_ids=[4, 5, r.sample_index]) for r in one.rollouts(first, **unlikely)]
    assert (await _finish(one, first, rows)).json()["accepted"] == [first[0].id]
    second, _ = await one.work(1)
    # Of two samples one is a copy; the other was only begun.
    begun = [replace(rows[0], work_item=second[0].id, reward=0.0), *_begun(one, second, sample_index=1)]
    assert (await _hand_back(one, begun)).json()["reason"] == "replayed"
    row = await control.node_row(one.id)
    assert (row.drain, (row.caught or "").partition(":")[0]) == (False, "replayed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"blake3": "0" * 64}, "hash"), ({"size": 7}, "truncated"), ({"work_items": ["job_x-1"]}, "foreign_work_item")],
)
async def test_a_partial_file_is_held_against_its_request(control: World, change: dict[str, Any], reason: str) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    items, _ = await node.work(1)
    answer = await _hand_back(node, _begun(node, items), **change)
    assert answer.json()["reason"] == reason


async def test_keys_of_other_nodes_and_of_other_files_are_not_taken(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    mine, _ = await one.work(1)
    theirs = await _put(two, _begun(one, mine))
    assert (await one.post("partials", theirs)).json()["reason"] == "foreign_key"
    # A trajectory file that was accepted is never handed in as a beginning: it would be removed with it.
    again, slot = await one.work(1)
    assert slot is not None
    data = encode(one.rollouts(again))
    await one.put(slot, data)
    body = {"key": slot.key, "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [again[0].id]}
    assert (await one.post("trajectories", body)).json()["accepted"] == [again[0].id]
    assert (await one.post("partials", body)).status_code == 409
    # Nor the other way round.
    more, _ = await one.work(1)
    handed = await _put(one, one.rollouts(more, reward=0.0))
    assert (await one.post("partials", handed)).json() == {"taken": [more[0].id]}
    async with control.svc.core.db.write() as session:
        (await session.get_one(Node, one.id)).drain = False
    got, _ = await one.work(1)
    assert got[0].id == more[0].id
    assert (await one.post("trajectories", handed)).json()["reason"] == "foreign_key"
    assert len(await learner.poll()) == 1


async def test_what_a_job_that_is_over_leaves_behind_is_removed(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    done, _ = await node.work(1)
    rows = [
        replace(r, logprobs=[-9.0, -9.0 - r.sample_index], completion_ids=[r.sample_index, 1])
        for r in node.rollouts(done)
    ]
    assert (await _finish(node, done, rows)).json()["accepted"] == [done[0].id]
    assert await _prints(control) == [done[0].id] * 2
    items, _ = await node.work(1)
    body = await _put(node, _begun(node, items))
    await node.post("partials", body)
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    await control.rounds(4, 10, node)
    assert (await control.job(job_id))["status"] == "cancelled"
    await control.svc.loop._collect_garbage()
    assert await _prints(control) == []
    assert not _there(control, body["key"])


async def test_a_node_that_drains_may_sample_on_before_it_hands_over(control: World) -> None:
    """Its agent goes on for 30 s: cut off before that, all that it has begun would be lost."""
    job_id = await control.create()
    learner, (node, *_) = await control.running(job_id)
    # A lease of work then lasts for 60 s.
    await learner.train([], t_train=15.0)
    items = await _two(node)
    ends = {"kind": "interruption", "source": "ec2", "detail": "spot/instance-action: terminate"}
    node.state = "draining"
    await node.beat(interruption=ends)
    await control.svc.controller.leases.drain_tasks()
    assert node.directives["drain"]
    await control.rounds(4, 8, node, learner)
    assert not node.directives["shutdown"]
    assert (await _hand_back(node, _begun(node, items))).json() == {"taken": [i.id for i in items]}
    await control.rounds(2, 8, node, learner)
    assert (await control.node_row(node.id)).state == "gone"
