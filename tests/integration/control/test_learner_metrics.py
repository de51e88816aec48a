"""What the learner tells of its newest step, for Prometheus."""

from __future__ import annotations

from tests.integration.control.rig import World


async def told(control: World, job_id: str) -> dict[str, float]:
    text = (await control.http.get("/metrics")).text
    begin = f'echo2_learner{{job="{job_id}",name="'
    lines = [line.removeprefix(begin) for line in text.splitlines() if line.startswith(begin)]
    return {line.partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_the_newest_step_is_told_until_the_learner_is_done(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    first = {"ess": 0.9, "grad_norm": 2.0, "ess_lag_3": 0.7, "mismatch_kl_node_n1": 0.5}
    await learner.train(await node.produce(2), metrics=first)
    assert await told(control, job_id) == {"ess": 0.9, "grad_norm": 2.0, "ess_lag_3": 0.7}
    await learner.train(await node.produce(2), metrics={"ess": 0.8, "grad_norm": 1.0, "ess_lag_1": 0.85})
    assert await told(control, job_id) == {"ess": 0.8, "grad_norm": 1.0, "ess_lag_1": 0.85}
    await learner.done()
    assert await told(control, job_id) == {}
