"""A learner that goes back is told what it made its steps from; what can't be trained on is told and counted."""

from __future__ import annotations

from typing import Any

import pytest

from app.fleet.replay import without_gap
from tests.integration.control.rig import GROUP, Learner, Node_, World


async def resumed(control: World, job_id: str, step: int) -> tuple[Learner, list[tuple[int, list[str]]]]:
    """A new process that goes on from a checkpoint, and the steps that it is to make again."""
    heir = Learner(control, job_id)
    await heir.start()
    body: dict[str, Any] = {
        "resume_step": step, "parameters": 1, "snapshot_bytes": 1, "train_prompts": 50, "eval_prompts": 1,
        "t_train_prior": 1.0, "manifest_public_key": "ab" * 32, "assets": [],
    }  # fmt: skip
    answer = await heir.post("ready", body)
    assert answer.status_code == 200, answer.text
    heir.step = step
    return heir, [(s["step"], s["work_items"]) for s in answer.json()["replay"]]


async def trained(control: World, steps: int) -> tuple[str, Learner, Node_, list[list[str]]]:
    """A job with some steps whose batches are in no order that anything else would give."""
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    batches = []
    for _ in range(steps):
        groups = sorted(await node.produce(2), reverse=True)
        await learner.train(groups)
        batches.append(groups)
    return job_id, learner, node, batches


async def test_steps_after_the_checkpoint_come_with_their_groups_in_order(control: World) -> None:
    job_id, _, _, batches = await trained(control, 4)
    heir, replay = await resumed(control, job_id, 1)
    assert replay == [(2, batches[1]), (3, batches[2]), (4, batches[3])]
    back = [g for ref in await heir.poll() for g in ref.work_items]
    assert sorted(back) == sorted(batches[1] + batches[2] + batches[3])
    assert [s["step"] for s in (await control.get(f"/v1/jobs/{job_id}/steps"))["items"]] == [1]
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["rollouts_trained"] == 2 * GROUP


async def test_a_checkpoint_of_steps_that_are_not_on_record_is_refused_at_once(control: World) -> None:
    """A learner went back to 1 elsewhere; then one comes whose checkpoint is of step 4 of before."""
    job_id, _, _, _ = await trained(control, 4)
    await resumed(control, job_id, 1)
    late = Learner(control, job_id)
    await late.start()
    assert late.last_step == 1
    body: dict[str, Any] = {
        "resume_step": 4, "parameters": 1, "snapshot_bytes": 1, "train_prompts": 50, "eval_prompts": 1,
        "t_train_prior": 1.0, "manifest_public_key": "ab" * 32, "assets": [],
    }  # fmt: skip
    answer = await late.post("ready", body)
    assert answer.status_code == 409
    assert "goes on from step 4, but 1 steps are on record" in answer.json()["detail"]


async def test_a_second_kill_before_it_has_caught_up_forgets_nothing(control: World) -> None:
    job_id, _, _, batches = await trained(control, 4)
    heir, _ = await resumed(control, job_id, 1)
    await heir.train(batches[1])
    await heir.train(batches[2])
    _, replay = await resumed(control, job_id, 2)
    assert replay == [(3, batches[2]), (4, batches[3])]
    last, replay = await resumed(control, job_id, 2)
    assert replay == [(3, batches[2]), (4, batches[3])]
    await last.train(batches[2])
    await last.train(batches[3])
    _, replay = await resumed(control, job_id, 4)
    assert replay == []


async def test_a_fresh_learner_has_nothing_to_make_again(control: World) -> None:
    job_id = await control.create()
    _, replay = await resumed(control, job_id, 0)
    assert replay == []


async def test_a_learner_that_went_another_way_is_not_sent_back_to_the_old_one(control: World) -> None:
    job_id, _, _, batches = await trained(control, 3)
    heir, _ = await resumed(control, job_id, 1)
    await heir.train([batches[2][0], batches[1][1]])
    _, replay = await resumed(control, job_id, 2)
    # Step 3 lacks one of its groups by now: what is left of it is free.
    assert replay == []


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        ({}, []),
        ({5: [(0, "a"), (1, "b")]}, [(5, ["a", "b"])]),
        ({6: [(0, "a")]}, []),
        ({5: [(0, "a")], 7: [(0, "b")]}, [(5, ["a"])]),
        ({5: [(1, "a")]}, []),
        ({5: [(0, "a")], 6: [(0, "b"), (2, "c")]}, [(5, ["a"])]),
        ({5: [(-1, "from before the upgrade")]}, []),
    ],
)
def test_a_plan_ends_at_the_first_step_that_is_not_whole(
    found: dict[int, list[tuple[int, str]]], whole: list[tuple[int, list[str]]]
) -> None:
    assert without_gap(4, found) == whole


async def test_what_a_waiting_learner_can_not_use_makes_room_at_once(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    groups = []
    while made := await node.produce(2):
        groups += made
    assert await node.produce(2) == []
    body = {"step": 0, "dropped": [{"work_item": g, "reason": "invalid"} for g in groups[:3]]}
    for _ in range(2):
        assert (await learner.post("drops", body)).status_code == 200
    assert len(await node.produce(9)) >= 1
    job = await control.job(job_id)
    assert job["learner"]["dropped"] == [{"reason": "invalid", "lag": None, "groups": 3}]
    left = [g for ref in await learner.poll() for g in ref.work_items]
    assert not set(groups[:3]) & set(left)
    assert set(groups[3:]) <= set(left)
    events = [e.message for e in await control.events(job_id) if e.kind == "groups_dropped"]
    assert events == ["the learner at step 0 can't train on 3 groups: 3 invalid"]
    text = (await control.http.get("/metrics")).text
    assert f'echo2_dropped_rollouts_total{{job="{job_id}",reason="invalid"}} {float(3 * GROUP)}' in text


async def test_what_was_told_while_waiting_is_in_the_record_of_the_step_and_once_in_the_totals(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    groups = await node.produce(2) + await node.produce(2)
    told = [{"work_item": groups[2], "reason": "invalid"}]
    await learner.tell("drops", {"step": 0, "dropped": told})
    await learner.train(groups[:2], told=told, dropped=[{"work_item": groups[3], "reason": "stale", "lag": 4}])
    (step,) = (await control.get(f"/v1/jobs/{job_id}/steps"))["items"]
    assert step["dropped"] == 2 * GROUP
    assert [d["groups"] for d in (await control.job(job_id))["learner"]["dropped"]] == [1, 1]
    totals = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]
    assert totals["rollouts_dropped"] == 2 * GROUP


async def test_an_empty_report_of_drops_is_refused(control: World) -> None:
    job_id = await control.create()
    learner = await control.ready_learner(job_id)
    assert (await learner.post("drops", {"step": 0, "dropped": []})).status_code == 422


async def test_drops_are_counted_by_reason_and_age(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    groups = await node.produce(2) + await node.produce(2)
    await learner.train(
        groups[:2],
        dropped=[
            {"work_item": groups[2], "reason": "stale", "lag": 4},
            {"work_item": groups[3], "reason": "stale", "lag": 5},
        ],
    )
    assert (await control.job(job_id))["learner"]["dropped"] == [
        {"reason": "stale", "lag": 4, "groups": 1},
        {"reason": "stale", "lag": 5, "groups": 1},
    ]
    text = (await control.http.get("/metrics")).text
    assert f'echo2_dropped_age_sum{{job="{job_id}",reason="stale"}} {float(9 * GROUP)}' in text


@pytest.mark.parametrize(("on_late", "again"), [("reissue", True), ("train", False)])
async def test_a_late_group_is_given_to_another_node_after_the_job_s_own_deadline(
    control: World, on_late: str, again: bool
) -> None:
    batch = {"prompts": 2, "group_size": GROUP, "group_deadline_s": 5, "on_late": on_late}
    job_id = await control.create(batch=batch)
    _, (node,) = await control.running(job_id)
    (item,), _ = await node.work(1)
    assert item.deadline_s == pytest.approx(5) if again else item.deadline_s > 5
    control.clock.advance(6)
    await node.beat()
    await control.round()
    status = {i.id: i.status for i in await control.items(job_id)}[item.id]
    assert status == ("pending" if again else "leased")


async def test_training_on_what_came_needs_a_deadline(control: World) -> None:
    from tests.integration.control.rig import job_body

    body = job_body(batch={"on_late": "train"})
    answer = await control.http.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "group_deadline_s" in answer.text
