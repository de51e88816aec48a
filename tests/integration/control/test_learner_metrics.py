"""What the learner tells of its newest step, for Prometheus."""

from __future__ import annotations

from tests.integration.control.rig import World


async def exported(control: World, begin: str) -> dict[str, float]:
    """What follows `begin` up to the next quote, and the value."""
    lines = [line for line in (await control.http.get("/metrics")).text.splitlines() if line.startswith(begin)]
    return {line.removeprefix(begin).partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def told(control: World, job_id: str) -> tuple[dict[str, float], dict[str, float]]:
    """The step's numbers, and those of single nodes."""
    numbers = await exported(control, f'echo2_learner{{job="{job_id}",name="')
    return numbers, await exported(control, f'echo2_node_mismatch_kl{{job="{job_id}",node="')


async def test_the_newest_step_is_told_until_the_learner_is_done(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    first = {"ess": 0.9, "grad_norm": 2.0, "ess_lag_3": 0.7, "mismatch_kl_node_n1": 0.5, "mismatch_kl_node_n2": 0.25}
    await learner.train(await node.produce(2), metrics=first)
    assert await told(control, job_id) == ({"ess": 0.9, "grad_norm": 2.0, "ess_lag_3": 0.7}, {"n1": 0.5, "n2": 0.25})
    second = {"ess": 0.8, "grad_norm": 1.0, "ess_lag_1": 0.85, "mismatch_kl_node_n2": 0.75}
    await learner.train(await node.produce(2), metrics=second)
    assert await told(control, job_id) == ({"ess": 0.8, "grad_norm": 1.0, "ess_lag_1": 0.85}, {"n2": 0.75})
    await learner.done()
    assert await told(control, job_id) == ({}, {})


async def test_waiting_is_told_of_each_step_but_the_first(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    for idle in (300.0, 0.5, 2.0):
        await learner.train(await node.produce(2), t_idle=idle)
    assert await exported(control, f'echo2_idle_seconds_sum{{job="{job_id}') == {"": 2.5}
    assert await exported(control, f'echo2_idle_seconds_count{{job="{job_id}') == {"": 2.0}
