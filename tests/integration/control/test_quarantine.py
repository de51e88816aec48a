"""What audits of the learner do to a node: nothing, as long as they pass; its end, at once, when they don't."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from blake3 import blake3
from sqlalchemy import select

from app.protocol.audits import AuditAnswer
from app.protocol.node import NodeState
from app.protocol.partial import encode_partial
from app.protocol.trajectory import encode
from app.protocol.work import WorkItem
from app.storage.models import AuditRow, Cooldown, Job
from app.storage.models import WorkItem as WorkItemRow
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import GROUP, Learner, Node_, World, machines


def audit(node: Node_, item: str, **changes: Any) -> dict[str, Any]:
    """An audit that passed."""
    good = {
        "node_id": node.id, "work_item": item, "version": 0, "verdict": "passed", "tokens": 100, "rms": 0.01,
        "kl": 5e-5, "reward_ok": True,
    }  # fmt: skip
    return {**good, **changes}


async def tell(learner: Learner, *audits: dict[str, Any]) -> AuditAnswer:
    answer = await learner.post("audits", {"audits": list(audits)})
    assert answer.status_code == 200, answer.text
    return AuditAnswer.model_validate(answer.json())


WRONG = {"verdict": "failed", "fault": "reward", "detail": "a reward is 1 off", "reward_ok": False}


async def test_audits_that_pass_are_counted_shown_and_told_to_the_next_learner(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items = await node.produce(3)
    told = [audit(node, items[0]), audit(node, items[1], rms=0.02, kl=2e-4)]
    assert await tell(learner, *told) == AuditAnswer()
    # The same ones again, as after a lost answer.
    assert await tell(learner, *told) == AuditAnswer()
    row = await control.node_row(node.id)
    assert (row.audits, row.audits_passed, row.audit_failures) == (2, 2, 0)
    (shown,) = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"]
    assert (shown["audits"], shown["audit_failures"]) == (2, 0)
    assert shown["drift"] == row.audit_rms
    assert 0.01 < shown["drift"] < 0.02
    assert shown["mismatch_kl"] == row.audit_kl
    assert 0 < shown["mismatch_kl"] < 2e-4
    assert {ref.audits_passed for ref in await learner.poll()} == {2}
    assert f'echo2_audits_total{{job="{job_id}",verdict="passed"}} 2.0' in (await control.http.get("/metrics")).text


@pytest.mark.parametrize("spot", [False, True])
async def test_the_learner_is_told_whether_a_machine_may_be_taken_away(
    control: World, provider: FakeProvider, spot: bool
) -> None:
    """Of those twice as much is computed again."""
    provider.spot = spot
    job_id = await control.create(fleet={"interruptible": spot})
    learner, (node,) = await control.running(job_id)
    await node.produce(1)
    assert [ref.interruptible for ref in await learner.poll()] == [spot]


@BOTH
async def test_a_failed_audit_takes_the_node_out_and_gives_its_untrained_work_to_others(control: World) -> None:
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    trained, *_ = lies = await liar.produce(3)
    (honest,) = await other.produce(1)
    leased, _ = await liar.work(1)
    await learner.train([trained])
    before = (await control.job(job_id))["status"], await control.node_row(liar.id)
    accepted = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["rollouts_accepted"]
    answer = await tell(learner, audit(liar, lies[1], **WRONG), audit(other, honest))
    assert sorted(answer.withdrawn) == sorted(lies[1:])
    assert answer.quarantined == [liar.id]

    items = {i.id: i for i in await control.items(job_id)}
    assert items[trained].status == "trained", "what was trained on stays on record"
    assert {items[i].status for i in [*lies[1:], leased[0].id]} == {"pending"}
    assert (items[honest].status, items[honest].node_id) == ("accepted", other.id)
    row = await control.node_row(liar.id)
    assert (row.state, row.drain, row.quarantined_at) == (NodeState.LOST, True, control.clock())
    assert row.reason == f"quarantined: reward: a reward is 1 off (work item {lies[1]})"
    assert row.rollouts_accepted == before[1].rollouts_accepted - 2 * GROUP
    totals = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]
    assert totals["rollouts_accepted"] == accepted - 2 * GROUP, "they are not counted twice once others did them"
    async with control.svc.core.db.read() as session:
        mean = await session.scalar(select(Job.length_mean))
    assert mean
    # What was leased to it the node may still count itself.
    assert totals["tokens_wasted"] == {"quarantined": round(2 * GROUP * mean)}
    lease = next(x for x in await control.leases() if x.id == row.lease_id)
    assert (lease.state, lease.reason) == ("releasing", row.reason)
    (event,) = [e for e in await control.events(job_id) if e.kind == "node_quarantined"]
    assert "a reward is 1 off" in event.message
    assert (event.data["node"], event.data["withdrawn"], event.data["failures"]) == (liar.id, 2, 1)
    async with control.svc.core.db.read() as session:
        cooldown = (await session.scalars(select(Cooldown).where(Cooldown.machine_id == lease.machine_id))).one()
    assert cooldown.until - control.clock() == 6 * 3600, "longer than after an ordinary loss"
    assert f'echo2_quarantined_nodes_total{{job="{job_id}"}} 1.0' in (await control.http.get("/metrics")).text

    assert (await liar.ask())["items"] == []
    await liar.beat()
    assert liar.directives["shutdown"]
    # Others do it, and the learner sees their answers only.
    assert set(await other.produce(3)) == {*lies[1:], leased[0].id}
    assert {ref.node_id for ref in await learner.poll()} == {other.id}
    await learner.train([*lies[1:], honest])
    assert {i.status for i in await control.items(job_id)} == {"trained", "accepted"}


async def test_the_answer_names_all_that_are_in_quarantine_however_often_it_is_asked(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    first, second = (await one.produce(1))[0], (await two.produce(1))[0]
    assert (await tell(learner, audit(one, first, **WRONG))).withdrawn == [first]
    again = await tell(learner, audit(one, first, **WRONG))
    assert (again.withdrawn, again.quarantined) == ([], [one.id])
    both = await tell(learner, audit(two, second, **WRONG))
    assert (both.withdrawn, set(both.quarantined)) == ([second], {one.id, two.id})
    assert (await control.kinds(job_id)).count("node_quarantined") == 2


async def test_suspects_add_up_over_learners_and_services(control: World) -> None:
    """Noise of 0.05 nats: no audit alone proves it."""
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    *items, last = await node.produce(5)
    noisy = {"verdict": "suspect", "fault": "logprobs", "rms": 0.05, "kl": 1.25e-3}
    for item in items:
        assert (await tell(learner, audit(node, item, **noisy))).quarantined == []
    await control.restart()
    await learner.start()
    assert (await tell(learner, audit(node, last, **noisy))).quarantined == [node.id]
    assert "0.05 nats RMS" in (await control.node_row(node.id)).reason


async def test_a_node_with_noise_within_the_bound_stays(control: World) -> None:
    job_id = await control.create(trust={"max_logprob_rms": 0.1})
    learner, (node,) = await control.running(job_id)
    items = await node.produce(3)
    audits = [audit(node, item, rms=0.08) for item in items]
    assert (await tell(learner, *audits)).quarantined == []


async def test_tokens_too_likely_for_too_long_are_a_lie(control: World) -> None:
    job_id = await control.create(batch={"prompts": 20})
    learner, (node, *_) = await control.running(job_id)
    items = await node.produce(12)
    odd = {"surprise": -30.0, "excess": -30.0, "variance": 100.0, "spread": 90.0, "jump": 2.0}
    answers = [(await tell(learner, audit(node, item, **odd))).quarantined for item in items]
    assert answers[0] == []
    assert [node.id] in answers
    assert "likelier" in (await control.node_row(node.id)).reason


async def test_a_group_that_the_learner_was_training_on_meanwhile_counts_as_trained(control: World) -> None:
    """The learner took it for a step, then the audit of another group convicted its node."""
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    taken, other = await node.produce(2)
    answer = await tell(learner, audit(node, other, **WRONG))
    assert taken in answer.withdrawn
    await learner.train([taken])
    assert {i.id: i.status for i in await control.items(job_id)} == {taken: "trained", other: "pending"}


async def test_what_a_liar_began_nobody_goes_on_with(control: World) -> None:
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    done = (await liar.produce(1))[0]
    items, _ = await liar.work(1)
    slot = (await liar.post("uploads", {"policy_version": 0})).json()
    rows = liar.rollouts(items, reward=0.0)[:1]
    data = encode_partial(rows)
    assert (await control.http.put(slot["url"], content=data, headers=slot["headers"])).status_code == 200
    body = {"key": slot["key"], "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [items[0].id]}
    assert (await liar.post("partials", body)).status_code == 200
    assert (await control.items(job_id))[1].partial_node == liar.id
    await tell(learner, audit(liar, done, **WRONG))
    assert (await control.items(job_id))[1].partial_key is None
    assert control.svc.core.objects.head(body["key"]) is None
    got = [*(await other.work(1))[0], *(await other.work(1))[0]]
    assert {i.id for i in got} == {done, items[0].id}
    assert all(i.partial is None for i in got)


async def _begin(node: Node_, items: Sequence[WorkItem], tokens: int) -> None:
    """Hand over the first sample of these groups, cut after so many tokens."""
    cut = {"completion_ids": [4, 5, 6][:tokens], "logprobs": [-0.1, -0.2, -0.3][:tokens], "finish_reason": "abort"}
    data = encode_partial(node.rollouts(items, reward=0.0, **cut)[:1])
    slot = (await node.post("uploads", {"policy_version": 0})).json()
    assert (await _upload(node, slot, data)).status_code == 200
    body = {"key": slot["key"], "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [items[0].id]}
    assert (await node.post("partials", body)).json() == {"taken": [items[0].id]}


async def _upload(node: Node_, slot: dict[str, Any], data: bytes) -> httpx.Response:
    return await node.world.http.put(slot["url"], content=data, headers=slot["headers"])


async def test_what_another_node_finished_of_a_liars_beginnings_stays_and_is_looked_at_by_itself(
    control: World,
) -> None:
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    done = (await liar.produce(1))[0]
    items, _ = await liar.work(1)
    await _begin(liar, items, 1)
    got, slot = await other.work(1)
    assert slot is not None
    # Its first sample goes on from the beginning.
    data = encode(other.rollouts(got, completion_ids=[4, 5], logprobs=[-0.1, -0.2]))
    await other.put(slot, data)
    assert (await other.commit(slot, data, [got[0].id])).json()["accepted"] == [items[0].id]
    answer = await tell(learner, audit(liar, done, **WRONG))
    assert answer.withdrawn == [done]
    (row,) = [i for i in await control.items(job_id) if i.id == items[0].id]
    assert (row.status, row.node_id, row.written_by) == ("accepted", other.id, [liar.id])


@pytest.mark.parametrize("leased", [False, True])
async def test_what_a_liar_began_is_given_to_nobody_through_other_hands(control: World, leased: bool) -> None:
    """An honest node went on with it and had to stop as well; a third one may be at it."""
    job_id = await control.create()
    learner, (liar, two, three) = await control.running(job_id, nodes=3)
    done = (await liar.produce(1))[0]
    items, _ = await liar.work(1)
    await _begin(liar, items, 1)
    got, _ = await two.work(1)
    assert got[0].id == items[0].id
    await _begin(two, got, 2)
    if leased:
        assert [i.id for i in (await three.work(1))[0]] == [items[0].id]
    await tell(learner, audit(liar, done, **WRONG))
    (row,) = [i for i in await control.items(job_id) if i.id == items[0].id]
    assert row.partial_key is None
    assert row.written_by == ([liar.id, two.id] if leased else [])
    assert row.status == ("leased" if leased else "pending")


async def test_audits_of_unknown_nodes_and_by_old_learners_change_nothing(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    (item,) = await node.produce(1)
    unknown = {**audit(node, item, **WRONG), "node_id": "node_x"}
    assert (await tell(learner, unknown)) == AuditAnswer()
    refused = await learner.post("audits", {"audits": [audit(node, item, **WRONG)]}, epoch=learner.epoch - 1)
    assert refused.status_code == 409
    for bad in (
        {"audits": []},
        {"audits": [audit(node, item, rms=-1.0)]},
        {"audits": [{**unknown, "verdict": "maybe"}]},
    ):
        assert (await learner.post("audits", bad)).status_code == 422
    async with control.svc.core.db.read() as session:
        assert (await session.scalars(select(AuditRow))).first() is None
    assert (await control.node_row(node.id)).quarantined_at is None


@pytest.mark.parametrize("kind", ["copied", "replayed"])
async def test_who_hands_in_copies_is_out_in_the_next_round(control: World, kind: str) -> None:
    """One completion for the whole group, or the answers of an earlier group to the same prompt."""
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    (before,) = await liar.produce(1)
    items, slot = await liar.work(1)
    assert slot is not None
    unlikely = {"completion_ids": [4, 5, 6], "logprobs": [-9.0, -9.0, -9.0]}
    if kind == "replayed":
        first = items[0]
        rows = [
            replace(r, completion_ids=[4, 5, 6 + r.sample_index], logprobs=[-9.0] * 3) for r in liar.rollouts([first])
        ]
        data = encode(rows)
        await liar.put(slot, data)
        assert (await liar.commit(slot, data, [first.id])).status_code == 200
        async with control.svc.core.db.write() as session:
            # As if the same prompt had come again, an epoch later.
            row = (await session.scalars(select(WorkItemRow).where(WorkItemRow.id == first.id))).one()
            index = row.prompt_index
        items, slot = await liar.work(1)
        assert slot is not None
        async with control.svc.core.db.write() as session:
            row = (await session.scalars(select(WorkItemRow).where(WorkItemRow.id == items[0].id))).one()
            row.prompt_index = index
        data = encode([replace(r, work_item=items[0].id) for r in rows])
    else:
        data = encode(liar.rollouts(items, **unlikely))
    await liar.put(slot, data)
    answer = await liar.commit(slot, data, [items[0].id])
    assert answer.json()["reason"] == kind
    await control.round()
    row_ = await control.node_row(liar.id)
    assert (row_.state, row_.quarantined_at) == (NodeState.LOST, control.clock())
    assert row_.reason.startswith(f"quarantined: {kind}: ")
    assert before in [i.id for i in await control.items(job_id) if i.status == "pending"]
    assert (await learner.page())["quarantined"] == [liar.id]
    assert (await control.node_row(other.id)).quarantined_at is None


@pytest.mark.parametrize("one_passes", [False, True])
async def test_a_job_in_which_every_node_lies_fails_before_its_money_is_gone(
    open_world: Callable[..., AbstractAsyncContextManager[World]], provider: FakeProvider, one_passes: bool
) -> None:
    """Another engine, another task package: each node would be expelled, and the next one rented."""
    provider.machines = machines(*[0.2] * 6)
    async with open_world() as control:
        job_id = await control.create(fleet={"max_nodes": 6})
        learner, nodes = await control.running(job_id, nodes=6)
        for number, node in enumerate(nodes[:5]):
            (item,) = await node.produce(1)
            good = one_passes and number == 0
            await tell(learner, audit(node, item) if good else audit(node, item, **WRONG))
        if one_passes:
            (item,) = await nodes[5].produce(1)
            await tell(learner, audit(nodes[5], item, **WRONG))
        await control.rounds(2)
        job = await control.job(job_id)
        assert (job["status"] in ("draining", "failed")) is not one_passes
        assert ("no audit has ever passed" in job["status_reason"]) is not one_passes
        await learner.beat()
        assert learner.command == ("run" if one_passes else "abort")
