"""What a conviction does not touch: other jobs, other nodes' work, and the same node a second time."""

from __future__ import annotations

from sqlalchemy import func, select

from app.storage.models import AuditRow
from tests.integration.control.rig import Learner, Node_, World
from tests.integration.control.test_files_and_records import begin
from tests.integration.control.test_heldout_audits import answered, rows, started
from tests.integration.control.test_quarantine import WRONG, audit, tell


async def another_job(control: World) -> tuple[str, Learner, Node_]:
    """One more job beside those that run, with a node."""
    before = {r.instance_id for r in control.provider.live()}
    job_id = await control.create()
    learner = await control.ready_learner(job_id)
    await control.round()
    await control.round(10)
    (machine,) = [r for r in control.provider.live() if r.instance_id not in before]
    return job_id, learner, await control.join(machine)


async def test_a_learner_convicts_nodes_of_its_own_job_only(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    (item,) = await node.produce(1)
    other_id, other, theirs = await another_job(control)
    (group,) = await theirs.produce(1)
    answer = await tell(learner, audit(theirs, group, **WRONG))
    assert (answer.withdrawn, answer.quarantined) == ([], [])
    row = await control.node_row(theirs.id)
    assert (row.quarantined_at, row.audits) == (None, 0)
    assert [i.status for i in await control.items(other_id)] == ["accepted"]
    assert (await tell(learner, audit(node, item, **WRONG))).quarantined == [node.id]
    assert (await other.page())["quarantined"] == []
    assert (await tell(other, audit(theirs, group))).quarantined == []


async def test_who_is_convicted_twice_at_a_time_is_out_once(control: World) -> None:
    job_id = await control.create()
    learner, (liar, other) = await control.running(job_id, nodes=2)
    one, two = await liar.produce(2)
    answer = await tell(learner, audit(liar, one, **WRONG), audit(liar, two, **WRONG))
    assert (sorted(answer.withdrawn), answer.quarantined) == (sorted([one, two]), [liar.id])
    assert (await control.kinds(job_id)).count("node_quarantined") == 1
    assert f'echo2_quarantined_nodes_total{{job="{job_id}"}} 1.0' in (await control.http.get("/metrics")).text
    # Others answer both, and are audited by themselves.
    assert set(await other.produce(2)) == {one, two}
    await tell(learner, audit(other, one), audit(other, two))
    assert (await control.node_row(other.id)).audits_passed == 2
    async with control.svc.core.db.read() as session:
        assert await session.scalar(select(func.count()).select_from(AuditRow)) == 4


async def test_what_honest_nodes_began_is_gone_on_with(control: World) -> None:
    job_id = await control.create()
    learner, (liar, honest, other) = await control.running(job_id, nodes=3)
    (done,) = await liar.produce(1)
    items, _ = await honest.work(1)
    begun = await begin(honest, items)
    await tell(learner, audit(liar, done, **WRONG))
    assert {i.id: i.partial_key for i in await control.items(job_id)}[items[0].id] == begun["key"]
    got, _ = await other.work(1)
    assert [(i.id, i.partial is not None) for i in got] == [(items[0].id, True)]


async def test_held_out_answers_of_others_stay(control: World) -> None:
    _, learner, (liar, other) = await started(control, nodes=2, prompts=30, eval_samples=1, eval_greedy=False)
    (item,) = await liar.produce(1)
    mine = await answered(other, {0})
    assert mine
    await tell(learner, audit(liar, item, **WRONG))
    found = await rows(control)
    assert {(found[i.id].status, found[i.id].node_id) for i in mine} == {("accepted", other.id)}
    assert all(found[i.id].trajectory_seq is not None for i in mine)
