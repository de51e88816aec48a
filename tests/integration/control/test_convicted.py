"""What was under way when a node was convicted: it left meanwhile, its groups were in a step, a learner goes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from app.protocol.node import NodeState
from app.protocol.trajectory import encode
from app.storage.models import Lease, Node
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import GROUP, Node_, World, machines
from tests.integration.control.test_quarantine import WRONG, audit, tell
from tests.integration.control.test_replay import resumed


async def totals(control: World, job_id: str) -> tuple[int, int]:
    """Rollouts that were accepted, and trained on."""
    shown = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]
    return shown["rollouts_accepted"], shown["rollouts_trained"]


async def hand_in_copies(node: Node_) -> str:
    """The same unlikely completion for a whole group; its work item."""
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items, completion_ids=[4, 5, 6], logprobs=[-9.0, -9.0, -9.0]))
    await node.put(slot, data)
    assert (await node.commit(slot, data, [items[0].id])).json()["reason"] == "copied"
    return items[0].id


@BOTH
@pytest.mark.parametrize("ending", ["left", "machine gone"])
async def test_who_is_caught_and_leaves_at_once_is_out_all_the_same(control: World, ending: str) -> None:
    """It knows from the refusal that it was caught, and the round comes a moment later."""
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    (before,) = await liar.produce(1)
    (honest,) = await other.produce(1)
    copied = await hand_in_copies(liar)
    if ending == "left":
        await liar.leave()
        state = NodeState.GONE
    else:
        async with control.svc.core.db.write() as session:
            lease = await session.get_one(Lease, (await session.get_one(Node, liar.id)).lease_id)
            control.svc.controller.leases.request_release(session, lease, "outbid")
        state = NodeState.LOST
    await control.round()
    row = await control.node_row(liar.id)
    assert (row.state, row.quarantined_at) == (state, control.clock())
    assert row.reason.startswith("quarantined: copied: ")
    status = {i.id: i.status for i in await control.items(job_id)}
    assert (status[before], status[copied], status[honest]) == ("pending", "pending", "accepted")
    assert (await learner.page())["quarantined"] == [liar.id]
    await control.rounds(2, 10, other, learner)
    assert (await control.kinds(job_id)).count("node_quarantined") == 1


@BOTH
async def test_a_group_of_a_step_is_not_trained_on_again_though_another_node_was_at_it_by_then(control: World) -> None:
    """Work that was withdrawn goes first: it is leased long before the step that it is in ends."""
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    taken, wrong = await liar.produce(2)
    await tell(learner, audit(liar, wrong, **WRONG))
    assert (await totals(control, job_id))[0] == 0
    items, slot = await other.work(2)
    assert taken in {i.id for i in items}
    assert slot is not None
    await learner.train([taken])
    assert await totals(control, job_id) == (GROUP, GROUP)
    # That one's answer is of no use any more, and does not count.
    data = encode(other.rollouts(items))
    await other.put(slot, data)
    assert taken not in (await other.commit(slot, data, [i.id for i in items])).json().get("accepted", [])
    assert {i.id: i.status for i in await control.items(job_id)}[taken] == "trained"
    assert taken not in [g for ref in await learner.poll() for g in ref.work_items]
    accepted, trained = await totals(control, job_id)
    assert (accepted - GROUP * len(await learner.poll()), trained) == (GROUP, GROUP)


@BOTH
async def test_a_learner_that_goes_back_does_not_wait_for_groups_of_a_node_that_was_convicted_since(
    control: World,
) -> None:
    """It takes nothing of theirs: they would be accepted for ever, and hold up a step that is to be made again."""
    job_id = await control.create(stop={"steps": 50})
    learner, (liar, other) = await control.running(job_id, nodes=2)
    steps = []
    for _ in range(3):
        steps.append([*(await liar.produce(1)), *(await other.produce(1))])
        await learner.train(steps[-1])
    # One was withdrawn while the learner was in the step, and is of the same file.
    last = await liar.produce(1)
    await tell(learner, audit(liar, steps[0][0], **WRONG))
    await learner.train(last)
    heir, replay = await resumed(control, job_id, 1)
    assert replay == [], "no step is whole without them"
    status = {i.id: (i.status, i.node_id) for i in await control.items(job_id)}
    assert status[steps[0][0]] == ("trained", liar.id), "that step stays as it was made"
    assert {status[g] for g in [steps[1][0], steps[2][0], *last]} == {("pending", None)}
    assert {status[steps[1][1]], status[steps[2][1]]} == {("accepted", other.id)}
    assert {ref.node_id for ref in await heir.poll()} == {other.id}
    assert await totals(control, job_id) == (4 * GROUP, 2 * GROUP)
    (told,) = [e.message for e in await control.events(job_id) if e.kind == "learner_ready" and "again" in e.message]
    assert told.endswith("; 2 groups are to be trained on again")
    again = await other.produce(3)
    assert set(again) == {steps[1][0], steps[2][0], *last}
    assert await totals(control, job_id) == (7 * GROUP, 2 * GROUP)


@pytest.mark.parametrize("trained", [False, True])
async def test_a_job_whose_nodes_all_hand_in_copies_fails_before_its_money_is_gone(
    open_world: Callable[..., AbstractAsyncContextManager[World]], provider: FakeProvider, trained: bool
) -> None:
    """An engine that makes the same of everything: nothing is ever accepted, so that nothing is ever audited."""
    provider.machines = machines(*[0.2] * 6)
    async with open_world() as control:
        job_id = await control.create(fleet={"max_nodes": 6}, trust={"audit_share": 0, "probation": 0})
        learner, (honest, *nodes) = await control.running(job_id, nodes=6)
        if trained:
            await learner.train(await honest.produce(1))
        for node in nodes:
            assert (await control.job(job_id))["status"] in ("provisioning", "running")
            await hand_in_copies(node)
            await control.round()
        await control.round()
        job = await control.job(job_id)
        assert (job["status"] in ("draining", "failed")) is not trained
        assert ("5 nodes were quarantined" in job["status_reason"]) is not trained


@pytest.mark.parametrize("ending", ["convicted", "left"])
async def test_who_is_out_accuses_nobody_any_more(control: World, ending: str) -> None:
    """Its token is still good for a last word, and two lies about bytes cost a node its lease."""
    job_id = await control.create()
    learner, nodes = await control.running(job_id, nodes=3)
    for node in nodes:
        await node.beat()
    child = next(n for n in nodes if n.directives["upstreams"][0]["kind"] == "peer")
    parent = child.directives["upstreams"][0]["node_id"]
    if ending == "convicted":
        (item,) = await child.produce(1)
        await tell(learner, audit(child, item, **WRONG))
    else:
        await child.leave()
    report = {"kind": "upstream_lied", "version": 0, "detail": "chunk 3", "subject": parent}
    for _ in range(2):
        assert (await child.post("reports", report)).status_code == 204
    row = await control.node_row(parent)
    assert (row.state, row.lies) == (NodeState.ACTIVE, 0)


@pytest.mark.parametrize("ending", ["convicted", "left"])
async def test_who_is_out_gets_no_more_of_the_object_store(control: World, ending: str) -> None:
    """New weights, and places to put anything, at the job's cost."""
    job_id = await control.create()
    learner, (node, *_) = await control.running(job_id)
    control.svc.core.objects.put(f"jobs/{job_id}/snapshots/0/manifest.json", b"{}")
    (item,) = await node.produce(1)
    headers = {"Authorization": f"Bearer {node.token}"}

    async def asked() -> list[int]:
        slot = await node.post("uploads", {"policy_version": 0})
        return [
            slot.status_code,
            (await control.http.get(f"/v1/nodes/{node.id}/snapshots/0", headers=headers)).status_code,
        ]

    assert await asked() == [200, 200]
    if ending == "convicted":
        await tell(learner, audit(node, item, **WRONG))
    else:
        await node.leave()
    assert await asked() == [410, 410]
