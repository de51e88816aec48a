"""Evaluations by the fleet: held-out prompts beside the training, never in it."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3
from sqlalchemy import select

from app.protocol.trajectory import Rollout, encode
from app.protocol.work import WorkItem
from app.storage.models import Job
from tests.integration.control.rig import Learner, Node_, World

UNAUDITED = {"audit_share": 0, "probation": 0, "each_version": False}


async def started(control: World, **learner: Any) -> tuple[str, Learner, Node_]:
    """A job at step 2 with v2 published, whose node has it: an exam of 3 prompts is due."""
    spec = {"eval_every": 2, "eval_samples": 2, **learner}
    job_id = await control.create(stop={"steps": 50}, learner=spec, trust=UNAUDITED)
    trainer = await control.ready_learner(job_id, eval_prompts=3)
    await control.round()
    await control.round(10)
    node = await control.join(control.provider.live()[0])
    for _ in range(2):
        await trainer.train(await node.produce(2))
    await trainer.publish(2)
    node.version = 2
    await node.beat()
    return job_id, trainer, node


async def exam(node: Node_) -> tuple[list[WorkItem], Any]:
    """Ask until what comes is held-out: training work comes first while there is room for it."""
    for _ in range(20):
        items, slot = await node.work()
        if not items or items[0].split == "heldout":
            return items, slot
    raise AssertionError("only training work came")


async def answer(node: Node_, items: list[WorkItem], slot: Any, right: set[int]) -> list[str]:
    """Answers; prompts in `right` are answered rightly by the first of their samples."""
    rollouts = [
        Rollout(i.id, i.prompt_index, s, [1], [4], [-0.1], [node.version], [0],
                float(i.prompt_index in right and s == 0), "stop")
        for i in items
        for s in range(i.group_size)
    ]  # fmt: skip
    data = encode(rollouts)
    await node.put(slot, data)
    found = await node.commit(slot, data, [i.id for i in items])
    assert found.status_code == 200, found.text
    accepted: list[str] = found.json()["accepted"]
    return accepted


async def test_a_version_is_evaluated_by_nodes_and_nothing_of_it_is_trained_on(control: World) -> None:
    job_id, learner, node = await started(control)
    before = await control.job(job_id)
    seen: list[WorkItem] = []
    while True:
        items, slot = await exam(node)
        if not items:
            break
        seen += items
        assert await answer(node, items, slot, {0, 1}) == [i.id for i in items]
    sampled = [i for i in seen if i.temperature is None]
    greedy = [i for i in seen if i.temperature is not None]
    assert sorted(i.prompt_index for i in sampled) == [0, 1, 2]
    assert sorted(i.prompt_index for i in greedy) == [0, 1, 2]
    assert {i.group_size for i in sampled} == {2}
    assert {i.group_size for i in greedy} == {1}
    job = await control.job(job_id)
    assert job["reward"]["eval"] == pytest.approx(2 / 6)
    assert job["reward"]["eval_initial"] == before["reward"]["eval_initial"]
    (told,) = [e.message for e in await control.events(job_id) if e.kind == "evaluated" and "fleet" in e.message]
    assert "v2 by the fleet: 0.3333, pass@2 0.6667, greedy 0.6667 over 3 prompts" in told
    ids = {i.id for i in seen}
    assert not ids & {g for ref in await learner.poll() for g in ref.work_items}
    directives = await learner.post("heartbeat", {"step": 2, "state": "training"})
    assert directives.json()["evaluated_step"] == 2
    assert directives.json()["evaluated_reward"] == pytest.approx(2 / 6)


async def test_training_work_comes_first_until_the_exam_has_waited_for_two_publish_periods(control: World) -> None:
    _, _, node = await started(control)
    items, _ = await node.work(1)
    assert items[0].split == "train"
    control.clock.advance(30)
    await node.beat()
    items, _ = await node.work(1)
    assert items[0].split == "heldout"


async def test_what_a_lost_node_held_is_answered_by_another(control: World) -> None:
    _, _, node = await started(control)
    items, _ = await exam(node)
    await node.leave()
    await control.round(10)
    await control.round(10)
    other = await control.join(control.provider.live()[0])
    other.version = 2
    await other.beat()
    again: list[WorkItem] = []
    while True:
        more, slot = await exam(other)
        if not more:
            break
        again += more
        await answer(other, more, slot, set())
    assert {i.id for i in items} <= {i.id for i in again}


async def test_answers_of_another_node_and_answers_that_do_not_fit_are_refused(control: World) -> None:
    _, _, node = await started(control)
    items, slot = await exam(node)
    data = encode([Rollout(items[0].id, 99, 0, [1], [4], [-0.1], [2], [0], 1.0, "stop")])
    await node.put(slot, data)
    body = {"key": slot.key, "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [items[0].id]}
    refused = await node.post("trajectories", body)
    assert refused.status_code == 422
    assert refused.json()["reason"] in ("wrong_prompt", "incomplete_group")
    back, _ = await exam(node)
    assert items[0].id in {i.id for i in back}, "a refused answer is asked for again"


async def test_an_exam_that_the_next_overtakes_half_answered_counts_and_less_does_not(control: World) -> None:
    job_id, learner, node = await started(control, eval_greedy=False)
    items, slot = await exam(node)
    await answer(node, items[:1], slot, {0})
    await learner.publish(4)
    kinds = [e.kind for e in await control.events(job_id)]
    assert "evaluation_overtaken" in kinds
    node.version = 4
    await node.beat()
    for _ in range(2):
        items, slot = await exam(node)
        await answer(node, items, slot, {0, 1, 2})
    await learner.publish(6)
    assert (await control.job(job_id))["reward"]["eval"] == pytest.approx(0.5)


async def test_the_learner_is_told_all_evaluations_and_the_newest_is_the_jobs(control: World) -> None:
    """Also when they come out of order: one that was in a checkpoint is told again by the learner that goes on."""
    job_id, learner, node = await started(control, eval_greedy=False)
    while (given := await exam(node))[0]:
        await answer(node, *given, {0})
    before = len(await control.events(job_id))
    await learner.evaluate(0, 0.1, initial=True)
    said = (await learner.post("heartbeat", {"step": 2, "state": "training"})).json()
    first, second = said["evaluations"]
    assert (first["step"], first["reward"]) == (2, pytest.approx(1 / 6))
    assert second == {"step": 0, "reward": 0.1}
    assert said["evaluated_step"] == 2, "v0's is older"
    job = await control.job(job_id)
    assert (job["reward"]["eval"], job["reward"]["eval_initial"]) == (pytest.approx(1 / 6), 0.1)
    await learner.evaluate(0, 0.1, initial=True)
    told = [e.kind for e in (await control.events(job_id))[before:]]
    assert told.count("evaluated") <= 1, "an evaluation that is told again is no news"
    await learner.evaluate(1, 0.05, final=True)
    assert (await control.job(job_id))["reward"]["eval"] == 0.05, "v2 was lost with its checkpoint: the job ends at v1"


async def test_a_learner_that_evaluates_itself_makes_no_exam(control: World) -> None:
    _, _, node = await started(control, eval_by="learner")
    control.clock.advance(60)
    await node.beat()
    for _ in range(6):
        items, _ = await node.work()
        assert all(i.split == "train" for i in items)


async def test_who_leases_held_out_prompts_and_never_answers_is_counted_against(control: World) -> None:
    job_id, trainer, node = await started(control)
    for count in (1, 2):
        items = [*(await exam(node))[0], *(await exam(node))[0]]
        assert len(items) > 1
        # Its training work does not run out here: that counts by itself.
        async with control.svc.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            control.clock.advance(max(i.deadline_s for i in items) + 1)
            await control.svc.controller.work.exams.expire(session, job)
        assert (await control.node_row(node.id)).files_refused == count, "once, however many ran out"
        await node.beat()
        await trainer.beat()
    items, slot = await exam(node)
    await answer(node, items, slot, set())
    assert (await control.node_row(node.id)).files_refused == 0, "answers that are accepted make up for it"


async def test_answers_to_an_exam_that_was_overtaken_are_late_and_nobodys_fault(control: World) -> None:
    job_id, trainer, node = await started(control)
    items, slot = await exam(node)
    for step in (3, 4):
        await trainer.train([])
        await trainer.publish(step)
    assert await answer(node, items, slot, {0}) == []
    assert (await control.node_row(node.id)).files_refused == 0
    assert "trajectory_refused" not in await control.kinds(job_id)
