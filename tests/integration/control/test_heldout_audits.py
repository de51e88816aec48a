"""Held-out answers that the learner computes again: nothing counts before that, and lies are asked again."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from app.protocol.learner import TrajectoryRef
from app.protocol.trajectory import encode
from app.protocol.work import WorkItem
from app.storage.models import ExamItem, Trajectory
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import Learner, Node_, World
from tests.integration.control.test_exams import UNAUDITED, answer, exam
from tests.integration.control.test_quarantine import audit, tell

SUSPECT = {"verdict": "suspect", "fault": "greedy", "detail": "1 of 2 tokens are not the likeliest ones"}


async def started(
    control: World, *, nodes: int = 1, trust: dict[str, Any] | None = None, prompts: int = 3, **learner: Any
) -> Any:
    """A job at step 2 with v2 published: an exam of so many prompts is due."""
    spec = {"eval_every": 2, "eval_samples": 2, **learner}
    job_id = await control.create(stop={"steps": 50}, learner=spec, **({"trust": trust} if trust else {}))
    trainer = await control.ready_learner(job_id, nodes, eval_prompts=prompts)
    await control.round()
    await control.round(10)
    players = [await control.join(r) for r in control.provider.live() if r.env]
    for _ in range(2):
        await trainer.train(await players[0].produce(2))
    await trainer.publish(2)
    for node in players:
        node.version = 2
        await node.beat()
    return job_id, trainer, players


async def answered(node: Node_, right: set[int]) -> list[WorkItem]:
    """All held-out prompts that the node gets, answered."""
    found: list[WorkItem] = []
    while True:
        items, slot = await exam(node)
        if not items:
            return found
        assert await answer(node, items, slot, right) == [i.id for i in items]
        found += items


async def waiting(learner: Learner) -> list[TrajectoryRef]:
    return [ref for ref in await learner.poll() if ref.heldout]


def good(node: Node_, refs: list[TrajectoryRef], **changes: Any) -> list[dict[str, Any]]:
    """Audits of all these answers, that passed."""
    return [
        audit(node, i, version=2, heldout="greedy" if i in ref.greedy else "sampled", **changes)
        for ref in refs
        for i in ref.work_items
    ]


async def rows(control: World) -> dict[str, ExamItem]:
    async with control.svc.core.db.read() as session:
        return {i.id: i for i in await session.scalars(select(ExamItem))}


async def files(control: World) -> list[str]:
    async with control.svc.core.db.read() as session:
        return list(await session.scalars(select(Trajectory.key).where(Trajectory.heldout.is_(True))))


async def evaluations(control: World, job_id: str) -> list[str]:
    return [e.message for e in await control.events(job_id) if e.kind == "evaluated" and "fleet" in e.message]


@BOTH
async def test_answers_of_a_node_on_probation_count_once_the_learner_has_computed_them_again(control: World) -> None:
    job_id, learner, (node,) = await started(control)
    seen = await answered(node, {0, 1})
    assert await evaluations(control, job_id) == [], "on the node's word alone nothing counts"
    refs = await waiting(learner)
    assert {i for ref in refs for i in ref.work_items} == {i.id for i in seen}
    assert {i for ref in refs for i in ref.greedy} == {i.id for i in seen if i.temperature is not None}
    assert {n for ref in refs for n in ref.group_sizes.values()} == {1, 2}
    assert {ref.node_id for ref in refs} == {node.id}
    # They are no groups to train on, and a learner that starts anew gets them again.
    await learner.start()
    assert await waiting(learner) == refs
    audits = good(node, refs)
    await tell(learner, *audits[:-1])
    assert await evaluations(control, job_id) == []
    (left,) = await waiting(learner)
    assert left.work_items == [audits[-1]["work_item"]]
    assert control.svc.core.objects.get(left.key)
    await tell(learner, audits[-1])
    (said,) = await evaluations(control, job_id)
    assert "0.3333, pass@2 0.6667, greedy 0.6667 over 3 prompts" in said
    assert await waiting(learner) == []
    assert await files(control) == []
    assert control.svc.core.objects.head(left.key) is None
    row = await control.node_row(node.id)
    assert (row.audits, row.audits_passed) == (len(audits), 0), "probation ends with groups that are trained on"


@BOTH
async def test_a_file_that_comes_after_answers_were_removed_is_one_that_the_learner_has_not_seen(
    control: World,
) -> None:
    _, learner, (node,) = await started(control)
    groups, place = await node.work(1)
    await answered(node, {0, 1})
    page = await learner.page()
    refs = [ref for ref in map(TrajectoryRef.model_validate, page["items"]) if ref.heldout]
    await tell(learner, *good(node, refs))
    assert await files(control) == [], "the newest files are gone"
    data = encode(node.rollouts(groups))
    await node.put(place, data)
    await node.commit(place, data, [i.id for i in groups])
    news = await learner.page(after=page["cursor"])
    assert [i for ref in news["items"] for i in ref["work_items"]] == [i.id for i in groups] != []


@pytest.mark.parametrize("fault", ["reward", "version", "greedy"])
async def test_who_lies_about_held_out_answers_is_out_and_all_its_answers_are_asked_again(
    control: World, fault: str
) -> None:
    job_id, learner, (liar, other) = await started(control, nodes=2)
    seen = await answered(liar, {0, 1, 2})
    first = (await waiting(learner))[0].work_items[0]
    found = await tell(learner, audit(liar, first, heldout="greedy", verdict="failed", fault=fault, detail="a lie"))
    assert found.quarantined == [liar.id]
    assert (await control.node_row(liar.id)).reason == f"quarantined: {fault}: a lie (work item {first})"
    assert await evaluations(control, job_id) == []
    assert {(i.status, i.trajectory_seq) for i in (await rows(control)).values()} == {("pending", None)}
    assert await files(control) == []
    again = await answered(other, set())
    assert {i.id for i in again} == {i.id for i in seen}
    await tell(learner, *good(other, await waiting(learner)))
    (said,) = await evaluations(control, job_id)
    assert " 0.0000," in said, "nothing of the liar's answers is left"


async def test_a_doubtful_answer_is_asked_of_another_node_and_three_of_them_are_a_lie(control: World) -> None:
    _, learner, (one, two) = await started(control, nodes=2, eval_samples=1)
    await answered(one, {0, 1, 2})
    refs = await waiting(learner)
    greedy = sorted(i for ref in refs for i in ref.greedy)
    rest = [a for a in good(one, refs) if a["work_item"] not in greedy]
    await tell(learner, *rest, audit(one, greedy[0], heldout="greedy", **SUSPECT))
    assert (await rows(control))[greedy[0]].status == "pending"
    assert (await exam(one))[0] == [], "not of the same one, as long as there is another"
    again = await answered(two, set())
    assert [i.id for i in again] == [greedy[0]]
    found = await tell(learner, *(audit(one, i, heldout="greedy", **SUSPECT) for i in greedy[1:]))
    assert found.quarantined == [one.id]
    assert "greedy: again and again" in (await control.node_row(one.id)).reason
    assert (await control.node_row(two.id)).quarantined_at is None


async def test_greedy_answers_say_nothing_of_drift_or_of_how_a_node_draws(control: World) -> None:
    _, learner, (node,) = await started(control, eval_samples=1)
    await answered(node, set())
    odd = {"rms": 9.0, "surprise": -300.0, "excess": -300.0, "variance": 10.0, "spread": 9.0, "jump": 2.0}
    refs = await waiting(learner)
    greedy = {i for ref in refs for i in ref.greedy}
    await tell(learner, *(a for a in good(node, refs, **odd) if a["work_item"] in greedy))
    row = await control.node_row(node.id)
    assert (row.audit_drift, row.audit_surprise, row.audit_rms) == (0.0, 0.0, None)
    assert (row.audit_excess, row.audit_variance, row.audit_spread, row.audit_jump) == (0.0, 0.0, 0.0, 0.0)
    assert row.quarantined_at is None


async def test_the_same_prompt_in_the_next_evaluation_says_nothing_new_of_how_a_node_draws(control: World) -> None:
    """Its random numbers are the same: an unlucky answer would count again and again."""
    _, learner, (node,) = await started(control, eval_samples=1, eval_greedy=False)
    drawn = {"surprise": 3.0, "excess": 3.0, "variance": 4.0, "spread": 5.0, "jump": 2.0}
    for version in (2, 4):
        node.version = version
        await node.beat()
        await answered(node, set())
        await tell(learner, *good(node, await waiting(learner), **drawn))
        assert (await control.node_row(node.id)).audit_surprise == pytest.approx(9.0)
        for _ in range(2):
            await learner.train([])
        await learner.publish(version + 2)
    assert (await control.node_row(node.id)).audits == 6


async def test_after_probation_some_answers_are_looked_at_and_the_others_count_at_once(control: World) -> None:
    trust = {"audit_share": 0.25, "probation": 0, "each_version": False}
    job_id, learner, (node,) = await started(control, trust=trust, prompts=60, eval_greedy=False, eval_samples=1)
    seen = await answered(node, {0})
    refs = await waiting(learner)
    asked = {i for ref in refs for i in ref.work_items}
    assert 1 <= len(asked) <= 40
    assert len(seen) == 60
    assert {i.id for i in (await rows(control)).values() if i.trajectory_seq is not None} == asked
    assert await evaluations(control, job_id) == []
    await tell(learner, *good(node, refs))
    assert len(await evaluations(control, job_id)) == 1


async def test_a_job_without_audits_believes_every_answer(control: World) -> None:
    job_id, learner, (node,) = await started(control, trust=UNAUDITED)
    await answered(node, {0})
    assert await waiting(learner) == []
    assert len(await evaluations(control, job_id)) == 1


async def test_answers_that_wait_when_the_next_evaluation_is_due_do_not_count(control: World) -> None:
    job_id, learner, (node,) = await started(control)
    await answered(node, {0, 1, 2})
    for step in (3, 4):
        await learner.train([])
        await learner.publish(step)
    assert await evaluations(control, job_id) == []
    assert "evaluation_overtaken" in await control.kinds(job_id)
    # Their files go, and audits that come late change nothing.
    await tell(learner, audit(node, f"{job_id}-eval-2-0", heldout="sampled"))
    assert await files(control) == []


async def test_an_answer_under_an_older_version_than_the_evaluations_is_refused(control: World) -> None:
    _, _, (node,) = await started(control)
    items, slot = await exam(node)
    node.version = 1
    with pytest.raises(AssertionError, match="sampled under an older version"):
        await answer(node, items, slot, {0})
    node.version = 2
    assert {i.id for i in items} <= {i.id for i in (await exam(node))[0]}, "it is asked again"


async def test_an_answer_that_is_committed_twice_counts_once_and_is_nobodys_fault(control: World) -> None:
    _, learner, (node,) = await started(control)
    items, slot = await exam(node)
    assert await answer(node, items, slot, {0}) == [i.id for i in items]
    # The answer was lost: the same file again, and then under a new key.
    assert await answer(node, items, slot, {0}) == [i.id for i in items]
    fresh = (await node.post("uploads", {"policy_version": 2})).json()
    assert await answer(node, items, type(slot).model_validate(fresh), {0}) == [i.id for i in items]
    assert (await control.node_row(node.id)).files_refused == 0
    assert len(await waiting(learner)) == 1
    assert control.svc.core.objects.head(fresh["key"]) is None
