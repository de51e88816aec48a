"""Word of a version or of rollouts that comes a moment late, or after a long past."""

from __future__ import annotations

import asyncio

import pytest

from app.fleet import trajectories
from app.protocol.trajectory import encode
from tests.integration.control.rig import World


async def test_file_of_a_version_that_is_being_published_waits_for_the_learners_word(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items, span_versions=[1]))
    await node.put(slot, data)
    commit = asyncio.create_task(node.commit(slot, data, [items[0].id]))
    await learner.train(await node.produce(2))
    await learner.publish(1)
    answer = await commit
    assert answer.status_code == 200, answer.text
    assert answer.json()["accepted"] == [items[0].id]
    assert "trajectory_refused" not in await control.kinds(job_id)


async def test_learner_that_starts_anew_need_not_page_through_what_was_trained_on(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "PAGE", 6)
    job_id = await control.create(stop={"steps": 1000})
    learner, (node,) = await control.running(job_id)
    for _ in range(trajectories.PAGE // 2 + 1):
        await learner.train([(await node.produce(1))[0], (await node.produce(1))[0]])
        await learner.publish(learner.step)
        node.version = learner.step
    [waiting] = await node.produce(1)
    heir = type(learner)(control, job_id)
    await heir.start()
    await heir.ready(resume_step=learner.step)
    assert [ref.work_items for ref in await heir.poll()] == [[waiting]]
