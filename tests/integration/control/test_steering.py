"""The pool's aim follows what the learner's steps say about waiting."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.control.rig import GROUP, Learner, Node_, World


async def run(control: World, job_id: str, learner: Learner, nodes: list[Node_], **report: Any) -> dict[str, Any]:
    """A window of steps that all report the same; the capacity that is shown afterwards."""
    for _ in range(12):
        await learner.train(await nodes[0].produce(2), **report)
        await learner.publish(learner.step)
        control.clock.advance(0.8)  # T_bcast: Eq. 2 asks for more than the learner consumes
        for node in nodes:
            node.version = learner.step
            await node.beat()
        await control.round()
    found: dict[str, Any] = (await control.get(f"/v1/jobs/{job_id}/fleet"))["capacity"]
    return found


async def test_a_learner_that_never_waits_lowers_the_aim_and_one_that_does_raises_it(control: World) -> None:
    job_id = await control.create(stop={"steps": 500})
    learner, nodes = await control.running(job_id, nodes=2)
    before = (await control.get(f"/v1/jobs/{job_id}/fleet"))["capacity"]
    assert before["mu_steered"] == pytest.approx(before["mu_target"], rel=0.01)
    for _ in range(2):
        busy = await run(control, job_id, learner, nodes, t_idle=0.0)
    assert busy["mu_steered"] < 0.9 * busy["mu_target"]
    assert busy["mu_steered"] >= busy["mu_knee"]
    assert busy["mu_target"] == pytest.approx(1.1 * busy["mu_min"]), "what Eq. 2 says is shown as before"
    assert busy["steering"]
    waiting = await run(control, job_id, learner, nodes, t_idle=1.0)
    assert waiting["mu_steered"] > busy["mu_steered"]
    told = [e.message for e in await control.events(job_id) if e.kind == "capacity_steered"]
    assert any("less" in m for m in told)
    assert any("more" in m for m in told)
    assert all("Eq. 2" in m for m in told)


@pytest.mark.parametrize(("groups", "knee"), [(1, 1.0), (2, 1.0), (4, 2.0)])
async def test_what_a_step_takes_beside_its_batch_is_not_what_it_needs(
    control: World, groups: int, knee: float
) -> None:
    """Steps of 2 s. One that took twice its batch, of what was to spare, would do its own in half of the time."""
    job_id = await control.create(stop={"steps": 500}, batch={"prompts": 2, "group_size": GROUP})
    learner, nodes = await control.running(job_id, nodes=2)
    for _ in range(8):
        await learner.train(await nodes[0].produce(groups), t_idle=0.0, t_train=2.0)
        await learner.publish(learner.step)
        for node in nodes:
            node.version = learner.step
            await node.beat()
        await control.round()
    capacity = (await control.get(f"/v1/jobs/{job_id}/fleet"))["capacity"]
    assert capacity["mu_knee"] == pytest.approx(knee * 2 * GROUP / 2.0)
    assert (await control.get(f"/v1/jobs/{job_id}"))["learner"]["t_train"] == pytest.approx(2.0)


async def test_the_aim_survives_a_restart_of_the_control_service(control: World) -> None:
    job_id = await control.create(stop={"steps": 500})
    learner, nodes = await control.running(job_id, nodes=2)
    aim = (await run(control, job_id, learner, nodes, t_idle=0.0))["mu_steered"]
    await control.stop()
    await control.start()
    await control.round()
    after = (await control.get(f"/v1/jobs/{job_id}/fleet"))["capacity"]
    assert after["mu_steered"] == pytest.approx(aim, rel=0.2)
    assert after["mu_steered"] < after["mu_target"]


@pytest.mark.parametrize(
    ("fixed", "oldest", "after"),
    [
        pytest.param(None, 2, 1, id="rollouts nearly as old as S allows"),
        pytest.param(None, 0, 2, id="young ones: it waits for something else"),
        pytest.param(2, 2, 2, id="the owner fixed the period"),
    ],
)
async def test_a_learner_that_waits_beside_old_rollouts_gets_versions_sooner_unless_the_owner_fixed_the_period(
    control: World, fixed: int | None, oldest: int, after: int
) -> None:
    job_id = await control.create(stop={"steps": 500}, publish_period=fixed)
    learner, nodes = await control.running(job_id, nodes=2)
    await run(control, job_id, learner, nodes, t_idle=0.2, t_train=2.0, lags={str(oldest): 2 * GROUP})
    assert (await control.get(f"/v1/jobs/{job_id}"))["publish_period"] == after
    told = [e.message for e in await control.events(job_id) if e.kind == "publish_period_steered"]
    assert len(told) == (after == 1)
    assert all("κ 2 → 1" in m for m in told)
