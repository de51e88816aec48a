"""Groups that nobody can answer: given to others first, dropped in the end, replaced; and work given back early."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from app.fleet.admission import prompt_at
from app.storage.models import ExamItem
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import GROUP, Node_, World
from tests.integration.control.test_exams import answer, exam, started
from tests.integration.control.test_plans import listening, plans


async def give_up(node: Node_, item: str, kind: str = "task_error", detail: str = "ZeroDivisionError()") -> None:
    body: dict[str, Any] = {"kind": kind, "subject": item, "detail": detail}
    if kind != "task_error":
        body = {"kind": kind, "subject": "generate", "detail": detail, "work_items": [item]}
    assert (await node.post("reports", body)).status_code == 204


@BOTH
@pytest.mark.parametrize("kind", ["task_error", "engine_error"])
async def test_a_prompt_that_always_fails_is_dropped_with_its_reason_and_another_takes_its_place(
    control: World, kind: str
) -> None:
    job_id = await control.create(batch={"prompts": 4})
    learner, nodes = await control.running(job_id, nodes=2)
    one, two = nodes[:2]
    (bad,), _ = await one.work(1)
    await give_up(one, bad.id, kind)
    assert [i.id for i in (await one.work(1))[0]] != [bad.id], "others are to try it first"
    (again,), _ = await two.work(1)
    assert again.id == bad.id
    await give_up(two, bad.id, kind)
    assert "group_given_up" not in await control.kinds(job_id)
    asked = [i.id for node in nodes for i in (await node.work(1))[0]]
    assert bad.id in asked
    (row,) = [i for i in await control.items(job_id) if i.id == bad.id]
    holder = next(n for n in nodes if n.id == row.node_id)
    await give_up(holder, bad.id, kind)

    (row,) = [i for i in await control.items(job_id) if i.id == bad.id]
    assert (row.status, row.drop_reason, row.drop_lag) == ("dropped", kind, None)
    dropped = (await control.job(job_id))["learner"]["dropped"]
    assert dropped == [{"reason": kind, "lag": None, "groups": 1}]
    (event,) = [e for e in await control.events(job_id) if e.kind == "group_given_up"]
    assert "given up 3 times, by" in event.message
    assert f"{kind}: ZeroDivisionError()" in event.message
    assert (event.data["work_item"], set(event.data["nodes"])) == (bad.id, set(row.failed_by))
    text = (await control.http.get("/metrics")).text
    assert f'echo2_dropped_rollouts_total{{job="{job_id}",reason="{kind}"}} {float(GROUP)}' in text
    # The learner gets as many groups as admission ever lets out.
    got: list[str] = []
    for _ in range(6):
        for node in nodes:
            got += await node.produce(20)
    assert len(got) + len(set(asked) - {bad.id}) + 1 >= 4 * 4
    assert bad.id not in got
    assert not {g for ref in await learner.poll() for g in ref.work_items} & {bad.id}


async def test_the_only_node_gives_a_group_up_three_times(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    for tries in range(3):
        (item,), _ = await node.work(1)
        assert item.prompt_index == prompt_at(0, 0, 50), tries
        await give_up(node, item.id)
    assert [i.status for i in await control.items(job_id)] == ["dropped"]
    assert [i.prompt_index for i in (await node.work(1))[0]] == [prompt_at(0, 1, 50)]


async def test_a_failure_is_counted_only_of_who_has_the_group(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    (item,), _ = await one.work(1)
    for _ in range(5):
        await give_up(two, item.id)
    (row,) = await control.items(job_id)
    assert (row.status, row.node_id, row.failures) == ("leased", one.id, 0)
    assert (await control.node_row(two.id)).files_refused == 0


async def test_a_job_of_which_no_prompt_can_be_answered_fails(control: World) -> None:
    job_id = await control.create()
    _, nodes = await control.running(job_id, nodes=2)
    given_up = 0
    while given_up < 2 * 2 * 3:
        for node in nodes:
            for item in (await node.work(1))[0]:
                await give_up(node, item.id)
                given_up += 1
    blamed = sorted([(await control.node_row(node.id)).files_refused for node in nodes])
    assert blamed == [0, 1], "where nothing was ever accepted, what another one fails at too is no node's fault"
    await control.rounds(2)
    job = await control.job(job_id)
    assert job["status"] in ("draining", "failed")
    assert "4 groups could not be sampled or scored by any node" in job["status_reason"]


@pytest.mark.parametrize("next_one_works", [True, False])
async def test_the_only_machine_fails_everything_and_is_replaced_before_the_job_is_blamed(
    control: World, next_one_works: bool
) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    for count in range(1, 21):
        (item,), _ = await node.work(1)
        await give_up(node, item.id, "engine_error")
        assert (await control.node_row(node.id)).files_refused == count
    await control.rounds(3, 10, learner)
    assert (await control.node_row(node.id)).state == "lost"
    assert (await control.job(job_id))["status"] == "provisioning", "nothing was trained on yet, and nothing is over"
    machines = {lease.machine_id for lease in await control.leases()}
    assert len(machines) == len(await control.leases()) == 2, "the machine cools down, and another one is rented"
    (other,) = [await control.join(r) for r in control.provider.live() if r.env]
    if next_one_works:
        assert await other.produce(1)
        await learner.train([i.id for i in await control.items(job_id) if i.status == "accepted"])
        await control.round()
        assert (await control.job(job_id))["status"] == "running"
        return
    while (found := await other.work(1))[0]:
        await give_up(other, found[0][0].id)
        await control.round()
        if (await control.job(job_id))["status"] in ("draining", "failed"):
            break
    assert "could not be sampled or scored by any node" in (await control.job(job_id))["status_reason"]
    assert (await control.node_row(other.id)).files_refused == 0


async def test_failures_count_against_a_node_like_refused_files_and_accepted_work_makes_up_for_them(
    control: World,
) -> None:
    job_id = await control.create(stop={"steps": 50})
    _, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(2)
    body = {"kind": "engine_error", "subject": "generate", "detail": "x", "work_items": [i.id for i in items]}
    assert (await one.post("reports", body)).status_code == 204
    assert (await control.node_row(one.id)).files_refused == 1, "one report, one fault"
    await two.produce(2)
    (item,), _ = await one.work(1)
    await give_up(one, item.id)
    assert (await control.node_row(one.id)).files_refused == 2
    (item,), _ = await two.work(1)
    await give_up(two, item.id)
    assert (await control.node_row(two.id)).files_refused == 1, "others failing excuses nobody once work was accepted"
    assert await one.produce(1)
    assert (await control.node_row(one.id)).files_refused == 0


async def test_a_group_given_up_makes_nobody_count_once_something_was_accepted(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    _, (node,) = await control.running(job_id)
    db = control.svc.core.db
    with listening(db, "drop_reason IN") as counted:
        await _drop_one(node)
    (plan,) = await plans(db, counted)
    assert "(job_id=? AND status=?)" in plan
    assert await node.produce(1)
    with listening(db, "drop_reason IN") as counted:
        await _drop_one(node)
    assert counted == []
    assert (await control.kinds(job_id)).count("group_given_up") == 2


async def _drop_one(node: Node_) -> None:
    for _ in range(3):
        (item,), _ = await node.work(1)
        await give_up(node, item.id)


async def test_a_held_out_prompt_that_always_fails_is_left_out_of_the_evaluation(control: World) -> None:
    job_id, _, node = await started(control, eval_greedy=False)
    while True:
        items, slot = await exam(node)
        if not items:
            break
        bad = [i for i in items if i.prompt_index == 1]
        for item in bad:
            await give_up(node, item.id)
        rest = [i for i in items if i.prompt_index != 1]
        if rest:
            await answer(node, rest, slot, {0, 2})
    (given_up,) = [e.message for e in await control.events(job_id) if e.kind == "group_given_up"]
    assert given_up.startswith("held-out prompt 1: given up 3 times")
    assert (await control.job(job_id))["reward"]["eval"] == pytest.approx(0.5)
    (said,) = [e.message for e in await control.events(job_id) if e.kind == "evaluated" and "fleet" in e.message]
    assert "over 2 prompts" in said


async def test_work_that_a_node_hands_back_is_somebody_elses_at_once(control: World) -> None:
    """Held-out answers under way on a node that drains don't wait for its lease, nor for its end."""
    job_id, _, node = await started(control)
    items, _ = await exam(node)
    train, _ = await node.work(1)
    held = [i.id for i in [*items, *train]]
    node.state = "draining"
    await node.beat()
    body = {"kind": "handed_back", "detail": f"{len(held)} work items will not be finished here", "work_items": held}
    assert (await node.post("reports", body)).status_code == 204
    async with control.svc.core.db.read() as session:
        status = {i.id: (i.status, i.node_id, i.failures) for i in await session.scalars(select(ExamItem))}
    assert {status[i.id] for i in items} == {("pending", None, 0)}
    (event,) = [e for e in await control.events(job_id) if e.kind == "handed_back"]
    assert (event.data["groups"], event.data["node"]) == (len(held), node.id)
    assert all(i.status != "leased" and i.failures == 0 for i in await control.items(job_id) if i.id in held)
