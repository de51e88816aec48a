"""Work and trajectories: what is handed out, what is refused, what comes back."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

from app.fleet import commits
from app.fleet.work import MOST_ASKING
from app.protocol.partial import encode_partial
from app.protocol.trajectory import encode
from app.protocol.work import UploadSlot, WorkItem
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import MU, PROMPTS, Learner, Node_, World

Spoil = Callable[[Node_, Sequence[WorkItem]], bytes]


def _spoiled(**changes: Any) -> Spoil:
    return lambda node, items: encode(node.rollouts(items, **changes))


def _wrong_schema(node: Node_, items: Sequence[WorkItem]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"work_item": [i.id for i in items]}), sink)
    return sink.getvalue()


def _truncated(node: Node_, items: Sequence[WorkItem]) -> bytes:
    return encode(node.rollouts(items))[:-20]


def _half_a_group(node: Node_, items: Sequence[WorkItem]) -> bytes:
    return encode(node.rollouts(items)[:-1])


REFUSALS: list[tuple[str, Spoil]] = [
    ("truncated", _truncated),
    ("truncated", lambda node, items: b"not parquet at all"),
    ("schema", _wrong_schema),
    ("incomplete_group", _half_a_group),
    ("future_version", _spoiled(span_versions=[5])),
    ("foreign_work_item", _spoiled(work_item="job_x-0")),
    ("wrong_prompt", _spoiled(prompt_index=49)),
    ("logprobs", _spoiled(logprobs=[-0.1, float("nan")])),
    ("logprobs", _spoiled(logprobs=[-0.1, 0.5])),
    ("lengths", _spoiled(logprobs=[-0.1])),
    ("lengths", _spoiled(completion_ids=list(range(513)), logprobs=[-0.1] * 513)),
    ("versions", _spoiled(span_starts=[1])),
    ("reward", _spoiled(reward=float("inf"))),
    ("finish_reason", _spoiled(finish_reason="bored")),
    ("quantisation", _spoiled(quantisation="int8")),
]


async def test_bad_file_is_refused_counted_and_its_work_given_out_again(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    for count, (reason, spoil) in enumerate(REFUSALS, 1):
        items, slot = await node.work(1)
        assert slot is not None
        data = spoil(node, items)
        await node.put(slot, data)
        answer = await node.commit(slot, data, [i.id for i in items])
        assert answer.status_code == 422, (reason, answer.text)
        assert (answer.json()["code"], answer.json()["reason"]) == ("trajectory_refused", reason), count
        assert [i.status for i in await control.items(job_id)] == ["pending"], reason
        assert (await control.node_row(node.id)).files_refused == count
    text = (await control.http.get("/metrics")).text
    for reason, times in Counter(reason for reason, _ in REFUSALS).items():
        assert f'echo2_refused_files_total{{job="{job_id}",reason="{reason}"}} {float(times)}' in text
    assert (await control.kinds(job_id)).count("trajectory_refused") == len(REFUSALS)
    assert await learner.poll() == []
    # The node goes on, and its good work makes up for the bad.
    assert await node.produce(1) == [items[0].id]
    assert [ref.work_items for ref in await learner.poll()] == [[items[0].id]]
    assert (await control.node_row(node.id)).files_refused == 0


@pytest.mark.parametrize("version", [1, 4])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_file_of_a_version_whose_word_is_late_is_asked_for_again(
    control: World, monkeypatch: pytest.MonkeyPatch, whole: bool, version: int
) -> None:
    """With S = 3 the learner can make v4 of what was sampled under v0; v5 is refused, as REFUSALS has it."""
    monkeypatch.setattr(commits, "PUBLISH_LAG_S", 0.1)
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, slot = await node.work(1)
    assert slot is not None
    rows = node.rollouts(items, span_versions=[version])
    data = encode(rows) if whole else encode_partial([replace(rows[0], finish_reason="abort")])
    await node.put(slot, data)
    path = "trajectories" if whole else "partials"
    body = {"key": slot.key, "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [items[0].id]}
    early = await node.post(path, body)
    assert (early.status_code, early.json()["code"]) == (409, "conflict")
    assert "send the file again" in early.json()["detail"]
    assert [i.status for i in await control.items(job_id)] == ["leased"]
    assert (await control.node_row(node.id)).files_refused == 0
    assert "trajectory_refused" not in await control.kinds(job_id)
    await learner.publish(version)
    assert (await node.post(path, body)).json()["accepted" if whole else "taken"] == [items[0].id]


async def test_a_job_with_quantised_snapshots_takes_only_files_that_say_so(control: World) -> None:
    job_id = await control.create(snapshot={"quantise": "int8"})
    _, (node,) = await control.running(job_id)
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items))
    await node.put(slot, data)
    answer = await node.commit(slot, data, [i.id for i in items])
    assert answer.json()["reason"] == "quantisation"
    assert "snapshot.quantise" in answer.json()["detail"]
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items, quantisation="int8"))
    await node.put(slot, data)
    assert (await node.commit(slot, data, [i.id for i in items])).json()["accepted"] == [items[0].id]


async def test_file_that_is_not_there_or_not_the_one_committed_is_refused(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    for change, reason in (({}, "missing"), ({"blake3": "0" * 64}, "hash"), ({"size": 7}, "truncated")):
        items, slot = await node.work(1)
        assert slot is not None
        data = encode(node.rollouts(items))
        if reason != "missing":
            await node.put(slot, data)
        answer = await node.commit(slot, data, [i.id for i in items], **change)
        assert answer.json()["reason"] == reason
    items, slot = await node.work(1)
    assert slot is not None
    stolen = slot.model_copy(update={"key": slot.key.replace(node.id, "node_other")})
    answer = await node.commit(stolen, b"x", [i.id for i in items])
    assert answer.json()["reason"] == "foreign_key"


async def test_work_of_another_node_is_refused_and_stays_with_it(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    theirs, slot_one = await one.work(1)
    _, slot_two = await two.work(1)
    assert slot_one is not None
    assert slot_two is not None
    data = encode(two.rollouts(theirs))
    await two.put(slot_two, data)
    answer = await two.commit(slot_two, data, [theirs[0].id])
    assert answer.json()["reason"] == "foreign_work_item"
    assert [(i.status, i.node_id) for i in await control.items(job_id)] == [("leased", one.id), ("leased", two.id)]
    data = encode(one.rollouts(theirs))
    await one.put(slot_one, data)
    assert (await one.commit(slot_one, data, [theirs[0].id])).json()["accepted"] == [theirs[0].id]


async def test_commit_that_is_repeated_is_answered_again(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, slot = await node.work(2)
    assert slot is not None
    data, ids = encode(node.rollouts(items)), [i.id for i in items]
    await node.put(slot, data)
    first = await node.commit(slot, data, ids)
    second = await node.commit(slot, data, ids)
    assert sorted(first.json()["accepted"]) == sorted(second.json()["accepted"]) == sorted(ids)
    assert (await control.job(job_id))["learner"]["dropped_ratio"] is None
    assert (await control.node_row(node.id)).rollouts_accepted == 4
    assert len(await learner.poll()) == 1


async def test_upload_url_takes_its_own_key_and_size_only(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    _, slot = await node.work(1)
    assert slot is not None
    assert (await control.http.put(slot.url.replace("/0/", "/1/"), content=b"x")).status_code == 403
    assert (await control.http.get(slot.url)).status_code == 403
    assert (await control.http.put(slot.url.split("?")[0], content=b"x")).status_code == 403


@BOTH
async def test_no_more_is_handed_out_than_can_be_trained_on_in_time(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    _, nodes = await control.running(job_id, nodes=2)
    answers = await asyncio.gather(*(node.ask(3) for node in nodes for _ in range(4)))
    given = [item["id"] for a in answers for item in a["items"]]
    # S + v − t + 1 = 4 steps of groups, and nothing of it twice.
    assert len(given) == len(set(given)) == 4 * PROMPTS
    waiting = await nodes[0].ask()
    assert waiting["items"] == []
    assert "admission" in waiting["reason"]
    assert [i.ordinal for i in await control.items(job_id)] == list(range(8))


async def test_waiting_for_work_and_for_rollouts_ends_with_the_news(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    made = await node.produce(2)
    first = max(ref.seq for ref in await learner.poll())
    polled = asyncio.create_task(learner.poll(after=first, wait_s=30))
    asked = asyncio.create_task(node.post("work", {"max_items": 1, "policy_version": 1, "wait_s": 30}))
    await asyncio.sleep(0.05)
    assert not polled.done()
    assert not asked.done()
    await learner.train(made)
    await learner.publish(1)
    answer = (await asyncio.wait_for(asked, 10)).json()
    assert len(answer["items"]) == 1
    later = await node.produce(1)
    assert [ref.work_items for ref in await asyncio.wait_for(polled, 10)] == [later]


async def test_only_so_many_requests_of_a_node_wait(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    body = {"max_items": 1, "policy_version": 1, "wait_s": 30}
    asked = [asyncio.create_task(one.post("work", body)) for _ in range(MOST_ASKING + 3)]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    while len(done) < 3:
        more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert more
        done |= more
    assert [task.result().json()["items"] for task in done] == [[]] * 3
    other = asyncio.create_task(two.post("work", body))
    finished, _ = await asyncio.wait([*waiting, other], timeout=0.1)
    assert not finished, "the others wait, and so does another node's"
    for task in (*waiting, other):
        task.cancel()
    await asyncio.gather(*waiting, other, return_exceptions=True)


async def test_prompts_come_in_the_seeded_order_once_an_epoch(control: World) -> None:
    first, second = await control.create(seed=5), await control.create(seed=5)
    orders = []
    for job_id in (first, second):
        learner = await control.ready_learner(job_id, train_prompts=8)
        orders.append(learner)
    await control.round()
    await control.round(10)
    nodes = [await control.join(r) for r in control.provider.live()]
    for node in nodes:
        assert len(await node.produce(8)) == 8
    seen = [[i.prompt_index for i in await control.items(j)] for j in (first, second)]
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == list(range(8))
    assert len({i.seed for i in await control.items(first)}) == 8


async def test_work_past_its_deadline_is_leased_again_and_the_late_answer_refused(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, slot = await node.work(2)
    assert slot is not None
    deadline = max(i.deadline_s for i in items)
    while deadline > 0:
        await control.rounds(1, 20, node, learner)
        deadline -= 20
    await control.rounds(1, 1, node, learner)
    assert [i.status for i in await control.items(job_id)] == ["pending", "pending"]
    assert "work_expired" in await control.kinds(job_id)
    again, _ = await node.work(2)
    assert [i.id for i in again] == [i.id for i in items]
    assert [i.attempts for i in await control.items(job_id)] == [2, 2]


async def test_who_leases_and_never_delivers_is_given_up(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    rounds = 0
    while (await control.node_row(node.id)).state == "active":
        assert rounds < 60
        rounds += 1
        items, _ = await node.work(1)
        deadline = max((i.deadline_s for i in items), default=0.0)
        while deadline > -1:
            await control.rounds(1, 20, node, learner)
            deadline -= 20
    assert rounds >= 20
    assert "leases ran out" in (await control.node_row(node.id)).reason


async def test_a_lease_that_ends_while_a_file_is_on_its_way_costs_that_group_only(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    (mine,), slot = await one.work(1)
    (theirs,), _ = await two.work(1)
    assert slot is not None
    data = encode(one.rollouts([mine, theirs]))
    await one.put(slot, data)
    answer = await one.commit(slot, data, [mine.id, theirs.id])
    assert answer.json() == {"accepted": [mine.id], "late": [theirs.id]}
    assert [(i.status, i.node_id) for i in await control.items(job_id)] == [("accepted", one.id), ("leased", two.id)]
    row = await control.node_row(one.id)
    assert (row.files_refused, row.rollouts_accepted) == (0, 2)
    # Nothing that the job doesn't have, though, nor another job's.
    (more,), slot = await one.work(1)
    assert slot is not None
    data = encode([*one.rollouts([more]), *one.rollouts([more.model_copy(update={"id": "job_x-1"})])])
    await one.put(slot, data)
    assert (await one.commit(slot, data, [more.id, "job_x-1"])).json()["reason"] == "foreign_work_item"


async def test_a_file_that_comes_after_its_node_left_is_no_event(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items))
    await node.put(slot, data)
    await node.leave("stopped by a signal")
    answer = await node.commit(slot, data, [items[0].id])
    assert answer.is_error
    assert "trajectory_refused" not in await control.kinds(job_id)
    assert (await control.node_row(node.id)).files_refused == 0


async def test_what_no_link_can_have_carried_is_not_charged(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    node.down = node.up = 2**53 - 1
    await node.beat()
    (lease,) = await control.leases()
    assert 0 < lease.download_bytes < 10**13
    assert 0 < lease.upload_bytes < 10**13


@pytest.mark.parametrize(
    "said",
    [
        '"rollouts_per_s": Infinity',
        '"tokens_per_s": 1e300',
        '"tokens_generated": 1' + "0" * 400,
        '"tokens_generated": -1',
        '"tokens_wasted": {"stale": 99999999999999999999}',
        '"bytes_down": 99999999999999999999',
        '"bytes_from": {"peer": -5}',
    ],
)
async def test_a_heartbeat_with_impossible_numbers_is_refused(control: World, said: str) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    body = f'{{"state": "active", "policy_version": 0, {said}}}'
    headers = {"Authorization": f"Bearer {node.token}", "Content-Type": "application/json"}
    answer = await control.http.post(f"/v1/nodes/{node.id}/heartbeat", content=body, headers=headers)
    assert answer.status_code == 422, answer.text
    assert (await control.node_row(node.id)).mu_measured == MU
    assert (await node.ask())["items"]


async def test_the_speed_of_a_self_test_rents_nothing(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await node.beat(MU / 10, tokens_per_s=100.0, probed=True)
    await control.rounds(3, 10, learner)
    assert len(provider.live()) == 1
    row = await control.node_row(node.id)
    assert (row.mu_measured, row.tokens_per_s) == (None, 100.0)


async def handed_in_late(learner: Learner, node: Node_) -> tuple[list[WorkItem], UploadSlot, dict[str, Any]]:
    """Two groups that are committed when the learner is two steps on; where their file is, and the answer."""
    items, slot = await node.work(2)
    assert slot is not None
    for _ in range(2):
        await learner.train([])
    data = encode(node.rollouts(items))
    await node.put(slot, data)
    answer = await node.commit(slot, data, [i.id for i in items])
    return items, slot, dict(answer.json())


async def test_rollouts_over_the_staleness_budget_are_dropped_and_counted(control: World) -> None:
    job_id = await control.create(staleness_budget=1, stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    items, _, answer = await handed_in_late(learner, node)
    assert (answer["accepted"], sorted(answer["late"])) == ([], sorted(i.id for i in items))
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["rollouts_dropped"] == 4
    assert (await node.ask())["items"] == []
    await learner.publish(2)
    node.version = 2
    assert len(await node.produce(2)) == 2


async def test_learner_that_resumes_gets_back_what_was_trained_on_after_its_checkpoint(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    trained = []
    for _ in range(3):
        groups = await node.produce(2)
        await learner.train(groups)
        trained.append(groups)
    assert await learner.poll() == []
    heir = Learner(control, job_id)
    await heir.start()
    assert heir.last_step == 3
    await heir.ready(resume_step=1)
    assert (await control.job(job_id))["step"] == 1
    back = [g for ref in await heir.poll() for g in ref.work_items]
    assert sorted(back) == sorted(trained[1] + trained[2])
    await heir.train(trained[1])
    await heir.train(trained[1])
    steps = (await control.get(f"/v1/jobs/{job_id}/steps"))["items"]
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert sorted(g for ref in await heir.poll() for g in ref.work_items) == sorted(trained[2])


async def test_learner_of_an_older_epoch_is_fenced_off(control: World) -> None:
    job_id = await control.create()
    old = await control.ready_learner(job_id)
    new = Learner(control, job_id)
    await new.start()
    for call, body in (
        ("heartbeat", {"step": 0, "state": "waiting"}),
        ("steps", {"step": 1, "t_train": 1, "t_idle": 0, "reward": 0, "trained": [], "lags": {}}),
        ("done", {"status": "failed", "step": 0}),
    ):
        assert (await old.post(call, body)).status_code == 409
    assert (await new.post("heartbeat", {"step": 0, "state": "waiting"})).status_code == 200
    assert (await control.job(job_id))["status"] == "pending"


async def test_step_counts_once_and_none_is_left_out(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    groups = await node.produce(2)
    await learner.train(groups)
    learner.step = 0
    await learner.train(groups)
    assert (await control.job(job_id))["step"] == 1
    gap = {"step": 3, "t_train": 1, "t_idle": 0, "reward": 0, "trained": [], "lags": {}}
    assert (await learner.post("steps", gap)).status_code == 409


async def test_dropped_groups_are_counted_once_and_not_offered_again(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    groups = await node.produce(3)
    await learner.train(groups[:2], dropped=[{"work_item": groups[2], "reason": "stale"}])
    assert await learner.poll() == []
    assert (await control.job(job_id))["learner"]["dropped_ratio"] == pytest.approx(1 / 3)


async def test_measured_throughput_calls_for_more_machines(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    for _ in range(3):
        control.clock.advance(10)
        await node.beat(mu=2.0)
        await control.round()
    assert len(provider.live()) > 1
    capacity = (await control.get(f"/v1/jobs/{job_id}/fleet"))["capacity"]
    assert capacity["mu_pool"] == pytest.approx(2.0)
    assert capacity["mu_target"] > 2.0


async def test_until_one_is_measured_several_machines_share_the_target(
    open_world: Callable[..., AbstractAsyncContextManager[World]], provider: FakeProvider
) -> None:
    async with open_world(first_nodes=3) as control:
        job_id = await control.create()
        await control.ready_learner(job_id)
        await control.round()
        assert len(provider.live()) == 3


async def test_infeasible_capacity_is_told_with_the_remedy_and_the_job_goes_on(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    await control.ready_learner(job_id, snapshot_bytes=20_000_000_000)
    await control.round()
    job = await control.job(job_id)
    assert job["capacity"]["feasible"] is False
    assert job["capacity"]["mu_min"] is None
    (told,) = [e for e in await control.events(job_id) if e.kind == "capacity_infeasible"]
    assert "publish_period" in told.message
    assert provider.creates.total() >= 1


async def test_broadcast_time_is_from_publish_to_the_last_node(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (one, two) = await control.running(job_id, nodes=2)
    await learner.train(await one.produce(2))
    await learner.publish(1)
    for node, seconds in ((one, 3.0), (two, 4.0)):
        control.clock.advance(seconds)
        node.version = 1
        await node.beat()
    assert (await control.job(job_id))["learner"]["t_bcast"] == pytest.approx(7.0)
    broadcast = (await control.get(f"/v1/jobs/{job_id}/fleet"))["broadcast"]
    assert (broadcast["completed"], broadcast["t_bcast_mean"]) == (1, pytest.approx(7.0))


async def test_a_broadcast_is_timed_by_those_who_were_there_for_it(control: World) -> None:
    """Not by a machine that died on the way."""
    job_id = await control.create(stop={"steps": 50})
    learner, (one, _) = await control.running(job_id, nodes=2)
    await learner.train(await one.produce(2))
    await learner.publish(1)
    control.clock.advance(3.0)
    one.version = 1
    await one.beat()
    assert (await control.job(job_id))["learner"]["t_bcast"] is None, "the other one does not have it"
    await control.rounds(9, 10.0, learner, one)
    broadcast = (await control.get(f"/v1/jobs/{job_id}/fleet"))["broadcast"]
    assert (broadcast["completed"], broadcast["t_bcast_mean"]) == (1, pytest.approx(3.0))
    assert (await control.job(job_id))["learner"]["t_bcast"] == pytest.approx(3.0)


async def test_nodes_form_chains_and_move_up_when_their_upstream_leaves(control: World) -> None:
    job_id = await control.create()
    _, nodes = await control.running(job_id, nodes=3)
    for node in nodes:
        await node.beat()
    uplinks = [[u["kind"] for u in n.directives["upstreams"]] for n in nodes]
    assert all(u[-1] == "store" and "learner" in u for u in uplinks)
    child = next(n for n in nodes if n.directives["upstreams"][0]["kind"] == "peer")
    parent = next(n for n in nodes if n.id == child.directives["upstreams"][0]["node_id"])
    await parent.leave()
    await child.beat()
    assert parent.id not in [u["node_id"] for u in child.directives["upstreams"]]


async def test_peer_that_lies_twice_is_given_up(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, nodes = await control.running(job_id, nodes=3)
    for node in nodes:
        await node.beat()
    child = next(n for n in nodes if n.directives["upstreams"][0]["kind"] == "peer")
    liar = next(n for n in nodes if n.id == child.directives["upstreams"][0]["node_id"])
    report = {"kind": "upstream_lied", "version": 0, "detail": "chunk 3"}
    # A node can't accuse one that it does not pull from.
    for _ in range(3):
        await liar.post("reports", {**report, "subject": child.id})
    assert (await control.node_row(child.id)).state == "active"
    for _ in range(2):
        assert (await child.post("reports", {**report, "subject": liar.id})).status_code == 204
    await liar.beat()
    assert liar.directives["shutdown"]
    await child.beat()
    assert liar.id not in [u["node_id"] for u in child.directives["upstreams"]]
    await control.round(1)
    row = await control.node_row(liar.id)
    assert row.state == "lost"
    assert {x.id: x.state for x in await control.leases()}[row.lease_id] in ("releasing", "released")
    await control.rounds(6, 10, *(n for n in nodes if n is not liar), learner)
    assert len(provider.live()) == 3


async def test_item_that_a_node_cannot_score_goes_to_another(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    (item,), _ = await one.work(1)
    (other,), _ = await two.work(1)
    for subject in (item.id, other.id, "job_x-1"):
        assert (await one.post("reports", {"kind": "task_error", "subject": subject})).status_code == 204
    assert [i.status for i in await control.items(job_id)] == ["pending", "leased"]
    assert [i.id for i in (await two.work(1))[0]] == [item.id]


async def test_snapshot_urls_are_given_once_the_version_is_stored(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    control.svc.core.objects.put(f"jobs/{job_id}/snapshots/0/manifest.json", b"{}")
    headers = {"Authorization": f"Bearer {node.token}"}
    answer = await control.http.get(f"/v1/nodes/{node.id}/snapshots/0", headers=headers)
    assert list(answer.json()["chunk_urls"]) == ["0"]
    assert (await control.http.get(answer.json()["manifest_url"], headers=headers)).content == b"{}"
    await learner.publish(1, stored=False)
    assert (await control.http.get(f"/v1/nodes/{node.id}/snapshots/1", headers=headers)).status_code == 404


async def test_a_version_that_is_stored_as_a_delta_comes_with_all_that_leads_to_it(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    delta = {"base": 0, "bytes": 30, "chunks": 2, "stored": True}
    await learner.tell(
        "published",
        {"version": 2, "bytes": 1000, "chunks": 5, "relay_url": "http://127.0.0.1:9", "stored": False, "delta": delta,
         "delta_share": 0.03},
    )  # fmt: skip
    headers = {"Authorization": f"Bearer {node.token}"}
    answer = (await control.http.get(f"/v1/nodes/{node.id}/snapshots/2?first=1", headers=headers)).json()
    assert (answer["manifest_url"], answer["chunk_urls"]) == ("", {})
    assert list(answer["delta"]["chunk_urls"]) == ["1"]
    assert f"jobs/{job_id}/snapshots/2/delta/chunks/1" in answer["delta"]["chunk_urls"]["1"]
    assert answer["parts"] == [
        {"version": 0, "base": None, "bytes": 1000},
        {"version": 2, "base": 0, "bytes": 30},
    ]
    shown = (await control.get(f"/v1/jobs/{job_id}/fleet"))["broadcast"]
    assert shown["publishes"][0] == {
        "version": 2, "bytes": 1000, "sent": "delta", "delta_base": 0, "delta_bytes": 30, "delta_share": 0.03,
        "note": "", "stored": "delta",
    }  # fmt: skip
    assert (shown["versions"], shown["deltas"], shown["delta_bytes_mean"]) == (2, 1, 30)
    assert shown["publishes"][1]["sent"] == "full"


def test_seeded_values_are_what_they_are() -> None:
    """A change here would silently change every seeded run."""
    from app.fleet.admission import item_seed, prompt_at

    assert [prompt_at(0, i, 5) for i in range(5)] == list(np.random.default_rng([0, 0]).permutation(5))
    assert len({item_seed(0, i) for i in range(100)}) == 100


@BOTH
async def test_a_zero_byte_in_what_is_said_is_no_fault_of_ours(control: World) -> None:
    _, (node,) = await control.running(await control.create())
    report = {"kind": "task_error", "subject": "w\0", "detail": "not \0 printable\nin two lines"}
    answer = await node.post("reports", report)
    if control.database_url.startswith("postgresql"):
        assert answer.status_code == 422
        assert "zero byte" in answer.json()["detail"]
    else:
        assert answer.status_code == 204
    assert (await node.post("reports", {**report, "subject": "w", "detail": "in two\nlines"})).status_code == 204
    assert all(e.message.isprintable() for e in await control.events(None))
