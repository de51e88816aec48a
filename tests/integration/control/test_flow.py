"""A job from its posting to its end."""

from __future__ import annotations

import pytest

from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import World


@BOTH
async def test_a_job_runs_from_posting_to_success(control: World, provider: FakeProvider) -> None:
    provider.download_micros_gb = 0  # What an image may have cost is kept back until its bill is known.
    job_id = await control.create()
    job = await control.job(job_id)
    assert job["status"] == "pending"
    learner = await control.ready_learner(job_id, nodes=2)
    assert control.supervisor.started == [job_id]
    assert provider.creates.total() == 0

    await control.round()
    assert (await control.job(job_id))["status"] == "provisioning"
    assert provider.live_machines() == ["m1", "m2"]
    await control.round(10)
    nodes = [await control.join(rented) for rented in provider.live()]
    fleet = await control.get(f"/v1/jobs/{job_id}/fleet")
    assert [n["state"] for n in fleet["nodes"]] == ["active", "active"]

    for _ in range(4):
        for node in nodes:
            await node.produce(1)
        groups = [g for ref in await learner.poll() for g in ref.work_items]
        assert len(groups) == 2
        await learner.train(groups)
        await learner.publish(learner.step)
        for node in nodes:
            node.version = learner.step
            await node.beat()
        await control.round(1)
        if learner.step == 1:
            assert (await control.job(job_id))["status"] == "running"
    assert (await control.job(job_id))["status"] == "draining"
    await learner.evaluate(4, 0.9, final=True)
    await learner.done()
    for node in nodes:
        await node.beat()
        assert node.directives["drain"]
        await node.leave()
    await control.round(1)
    await control.round(1)

    job = await control.job(job_id)
    assert job["status"] == "succeeded"
    assert (job["step"], job["published_version"]) == (4, 4)
    assert job["reward"] == {"train": 0.5, "eval": 0.9, "eval_initial": 0.1}
    assert provider.live() == []
    assert {lease.state for lease in await control.leases()} == {"released"}
    assert all(count == 1 for count in provider.creates.values())
    steps = await control.get(f"/v1/jobs/{job_id}/steps")
    assert [s["step"] for s in steps["items"]] == [1, 2, 3, 4]
    cost = await control.get(f"/v1/jobs/{job_id}/cost")
    assert float(cost["spent_usd"]) > 0
    assert float(cost["spent_usd"]) == pytest.approx(sum(float(v) for v in cost["by_kind"].values()))
    assert cost["committed_usd"] == cost["spent_usd"]
