"""The control process dies and another takes over: same jobs, same leases, same money."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from app.protocol.trajectory import encode
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider, Outcome
from tests.integration.control.rig import World


@BOTH
async def test_job_goes_on_after_a_restart_in_its_middle(control: World, provider: FakeProvider) -> None:
    outcomes: list[Outcome] = ["created", "die_after"]
    provider.outcomes = deque(outcomes)
    job_id = await control.create()
    learner = await control.ready_learner(job_id, nodes=2)
    await control.round()
    assert sorted(x.state for x in await control.leases()) == ["booting", "intent"]
    await control.restart()
    await control.round(10)
    assert {x.state for x in await control.leases()} == {"booting"}
    assert "lease_adopted" in await control.kinds(job_id)
    nodes = [await control.join(rented) for rented in provider.live()]
    assert len(nodes) == 2
    items, slot = await nodes[0].work(1)
    await control.round(5)

    await control.restart()
    assert control.supervisor.started == []
    await learner.beat()
    for node in nodes:
        await node.beat()
    await control.round(5)
    assert control.supervisor.started == []
    assert provider.creates.total() == len(provider.creates) == 2
    # What was leased before is answered to the new process, and what was accepted is there.
    assert [i.status for i in await control.items(job_id)] == ["leased"]
    assert slot is not None
    data = encode(nodes[0].rollouts(items))
    await nodes[0].put(slot, data)
    answer = await nodes[0].commit(slot, data, [items[0].id])
    assert answer.json()["accepted"] == [items[0].id]
    for _ in range(4):
        await nodes[1].produce(2)
        await learner.train([g for ref in await learner.poll() for g in ref.work_items][:2])
        await control.restart()
        await learner.beat()
        for node in nodes:
            await node.beat()
        await control.round(31)
    assert (await control.job(job_id))["step"] == 4
    await learner.done()
    for node in nodes:
        await node.leave()
    await control.restart()
    await control.round(5)
    await control.round(5)
    assert (await control.job(job_id))["status"] == "succeeded"
    assert provider.live() == []
    by_lease: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in await control.ledger():
        by_lease.setdefault((entry.lease_id, entry.kind), []).append((entry.start, entry.end))
    for lease in await control.leases():
        machine = provider.rented[lease.instance_id or ""]
        for kind, start in (("gpu", machine.runs_at), ("disk", machine.created_at)):
            rows = by_lease[lease.id, kind]
            assert (rows[0][0], rows[-1][1]) == (start, machine.gone_at)
            assert all(a[1] == b[0] for a, b in pairwise(rows))
        true = provider.cost(lease.label)
        assert (lease.spent_gpu, lease.spent_disk) == (int(true["gpu"]), int(true["disk"]))


@pytest.mark.parametrize("outcome", ["die_before", "die_after"])
async def test_intent_of_a_dead_process_is_settled_by_the_listing(
    control: World, provider: FakeProvider, outcome: Outcome
) -> None:
    provider.outcomes = deque([outcome])
    provider.listing_lag_s = 15
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.restart()
    await control.round(5)
    assert [x.state for x in await control.leases()] == ["intent"]
    for _ in range(12):
        await control.round(9)
    states = [(x.machine_id, x.state) for x in await control.leases()]
    settled = {"die_after": [("m1", "booting")], "die_before": [("m1", "refused"), ("m2", "booting")]}
    assert states == settled[outcome]
    assert all(count == 1 for count in provider.creates.values())


async def test_release_that_was_decided_is_carried_out_by_the_next_process(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id)
    provider.release_failures = 1
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    for _ in range(3):
        await control.round(10)
    assert [x.state for x in await control.leases()] == ["releasing"]
    await control.restart()
    for _ in range(3):
        await control.round(10)
    assert provider.live() == []
    assert (await control.job(job_id))["status"] == "cancelled"


async def test_learner_that_is_silent_after_a_restart_is_started_again(control: World) -> None:
    job_id = await control.create()
    await control.running(job_id)
    await control.restart()
    await control.round(5)
    assert control.supervisor.started == []
    await control.round(30)
    assert control.supervisor.started == [job_id]


async def test_keys_and_tokens_outlive_the_process(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    made = (await control.http.post("/v1/keys", json={"name": "ci"})).json()
    await control.restart()
    await node.beat()
    await learner.beat()
    answer = await control.http.get("/v1/jobs", headers={"Authorization": f"Bearer {made['key']}"})
    assert answer.status_code == 200
    assert len((await control.get("/v1/keys"))["items"]) == 2
