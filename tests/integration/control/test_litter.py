"""Files of rollouts: what nobody will read is removed, what a learner may ask for again never is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from app.fleet.litter import Litter
from app.learner.checkpoints import MARKER
from app.learner.keeper import Keeper
from tests.integration.control.rig import Learner, Node_, World
from tests.integration.control.test_exams import answer, exam
from tests.integration.control.test_heldout_audits import started
from tests.integration.control.test_quarantine import WRONG, audit, tell
from tests.integration.control.test_work import handed_in_late

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
SETTLED_S = 2 * 3600


async def step(learner: Learner, node: Node_) -> set[str]:
    """One step on what the node makes; the keys of its files."""
    groups = await node.produce(2)
    assert len(groups) == 2
    keys = {ref.key for ref in await learner.poll()}
    await learner.train(groups)
    await learner.publish(learner.step)
    node.version = learner.step
    await node.beat()
    return keys


async def sweep(control: World) -> set[str]:
    """What is there after a sweep, of all keys of files."""
    await control.svc.loop._collect_garbage()
    return {item.key for item in control.svc.core.objects.list("jobs/") if "/trajectories/" in item.key}


def put_checkpoint(control: World, job_id: str, number: int, folder: Path) -> None:
    """What a learner puts into the store, as it does."""
    made = folder / str(number)
    made.mkdir()
    for name in ("state.json", "model.safetensors", MARKER):
        (made / name).write_text("{}")
    Keeper(control.svc.core.objects, f"jobs/{job_id}/checkpoints/", folder, every=1).put(number, made)


async def pass_time(control: World, learner: Learner, node: Node_) -> None:
    """Long enough for every place to put a file to be void; nobody is lost."""
    control.clock.advance(SETTLED_S + 60)
    await node.beat()
    await learner.beat()


async def test_a_file_that_was_never_handed_in_goes_and_accepted_ones_stay(control: World) -> None:
    job_id = await control.create(stop={"steps": 100})
    learner, (node,) = await control.running(job_id)
    _, slot = await node.work(1)
    assert slot is not None
    await node.put(slot, b"nobody handed this in")
    files: set[str] = set()
    for _ in range(6):
        control.clock.advance(400)
        await node.beat()
        await learner.beat()
        await control.round()
        files |= await step(learner, node)
    found = await sweep(control)
    assert slot.key in found, "its place is still good"
    await pass_time(control, learner, node)
    for _ in range(2):
        assert await sweep(control) == files, "the record of the run stays, and what was not accepted goes"


async def test_with_a_bound_files_go_once_no_learner_can_go_back_to_them(open_world: OpenWorld) -> None:
    async with open_world(keep_trajectory_steps=3) as control:
        learning = {"checkpoint_every": 1, "checkpoint_upload_every": 2}
        job_id = await control.create(stop={"steps": 100}, learner=learning)
        learner, (node,) = await control.running(job_id)
        files = [await step(learner, node) for _ in range(12)]
        assert await sweep(control) == set().union(*files), "a learner may go back a while"
        await pass_time(control, learner, node)
        # Two uploads of two checkpoints each are four steps: more than the three that were asked for.
        assert await sweep(control) == set().union(*files[8:])
        await learner.start()
        await learner.ready(resume_step=8)
        assert {ref.key for ref in await learner.poll()} == set().union(*files[8:]), (
            "all that it has to train on again is there"
        )


async def test_what_a_learner_would_train_on_again_stays_while_uploads_fail_and_versions_come_faster(
    open_world: OpenWorld, tmp_path: Path
) -> None:
    async with open_world(keep_trajectory_steps=0) as control:
        job_id = await control.create(stop={"steps": 100}, learner={"checkpoint_upload_every": 2})
        learner, (node,) = await control.running(job_id)
        files = [await step(learner, node) for _ in range(8)]
        # κ is 2, and every second checkpoint is uploaded.
        for number in (4, 8):
            put_checkpoint(control, job_id, number, tmp_path)
        answer = await control.http.patch(f"/v1/jobs/{job_id}", json={"staleness_budget": 2})
        assert answer.json()["publish_period"] == 1
        files += [await step(learner, node) for _ in range(12)]
        await pass_time(control, learner, node)
        assert await sweep(control) == set().union(*files[4:]), "the newest checkpoint in the store may be damaged"
        await learner.start()
        await learner.ready(resume_step=4)
        assert {ref.key for ref in await learner.poll()} == set().union(*files[4:])


async def test_a_checkpoint_that_comes_into_the_store_lets_files_go(open_world: OpenWorld, tmp_path: Path) -> None:
    async with open_world(keep_trajectory_steps=0) as control:
        job_id = await control.create(stop={"steps": 100}, learner={"checkpoint_upload_every": 1})
        learner, (node,) = await control.running(job_id)
        files = [await step(learner, node) for _ in range(12)]
        put_checkpoint(control, job_id, 2, tmp_path)
        await pass_time(control, learner, node)
        assert await sweep(control) == set().union(*files[2:])
        for number in (10, 12):
            put_checkpoint(control, job_id, number, tmp_path)
        # Two checkpoints are four steps.
        assert await sweep(control) == set().union(*files[8:])


async def test_what_a_job_that_is_over_left_behind_goes_too(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    keys = await step(learner, node)
    _, slot = await node.work(1)
    assert slot is not None
    await node.put(slot, b"late")
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    await node.leave()
    await control.rounds(3, 10)
    assert (await control.job(job_id))["status"] == "cancelled"
    assert await sweep(control) == keys | {slot.key}
    control.clock.advance(SETTLED_S + 60)
    assert await sweep(control) == keys


async def test_a_file_that_came_too_late_for_all_its_groups_goes_once_it_is_old(control: World) -> None:
    job_id = await control.create(staleness_budget=1, stop={"steps": 100})
    learner, (node,) = await control.running(job_id)
    _, slot, said = await handed_in_late(learner, node)
    assert said["accepted"] == []
    await learner.publish(2)
    node.version = 2
    await node.beat()
    files: set[str] = set()
    for _ in range(3):
        files |= await step(learner, node)
    assert await sweep(control) == files | {slot.key}, "not while its place is good"
    await pass_time(control, learner, node)
    assert await sweep(control) == files


async def test_a_file_whose_groups_were_all_accepted_from_elsewhere_goes_with_a_bound(open_world: OpenWorld) -> None:
    async with open_world(keep_trajectory_steps=1) as control:
        job_id = await control.create(
            stop={"steps": 100}, learner={"checkpoint_every": 1, "checkpoint_upload_every": 1}
        )
        learner, (liar, other) = await control.running(job_id, nodes=2)
        withdrawn = await liar.produce(2)
        lies = {ref.key for ref in await learner.poll()}
        assert (await tell(learner, audit(liar, withdrawn[0], **WRONG))).quarantined == [liar.id]
        assert sorted(await other.produce(2)) == sorted(withdrawn)
        truth = {ref.key for ref in await learner.poll()}
        await learner.train(withdrawn)
        await learner.publish(learner.step)
        other.version = learner.step
        await other.beat()
        # Accepted, and never trained on: what names it is what keeps it.
        waits = await other.produce(1)
        (kept,) = [ref.key for ref in await learner.poll() if ref.work_items == waits]
        for _ in range(8):
            await learner.train(await other.produce(2))
            await learner.publish(learner.step)
            other.version = learner.step
            await other.beat()
        assert {*lies, *truth, kept} <= await sweep(control), "not while files of that time may come"
        await pass_time(control, learner, other)
        left = await sweep(control)
        assert kept in left
        assert not (lies | truth) & left


async def test_answers_to_held_out_prompts_that_wait_for_the_learner_stay(open_world: OpenWorld) -> None:
    """No training group names their file."""
    async with open_world(keep_trajectory_steps=1) as control:
        _, learner, (node,) = await started(control)
        items, slot = await exam(node)
        await answer(node, items, slot, {0})
        (ref,) = [ref for ref in await learner.poll() if ref.heldout]
        async with control.svc.core.db.read() as session:
            assert await Litter(control.svc.core)._judge(session, [ref.key], 0) == ([], [])
