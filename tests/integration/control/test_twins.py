"""Prompts that go out twice: to another node, beside the order, with nothing that tells; and whom they convict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import select

from app.fleet.admission import item_seed, prompt_at
from app.fleet.selection import compare
from app.protocol.trajectory import encode
from app.protocol.work import UploadSlot, WorkItem
from app.storage.models import Twin
from app.storage.models import WorkItem as WorkItemRow
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import Learner, Node_, World

ALL = {"twin_share": 1.0}
Score = Callable[[int], float]
"""Sample → reward."""


def honest(sample: int) -> float:
    """Every other answer is right."""
    return float(sample % 2)


def chosen(_: int) -> float:
    """All are."""
    return 1.0


async def twins(world: World) -> list[Twin]:
    async with world.svc.core.db.read() as session:
        return list(await session.scalars(select(Twin).order_by(Twin.compared_at, Twin.second)))


async def answer(node: Node_, items: list[WorkItem], score: Score, version: int | None = None) -> list[str]:
    """Hand in groups; those that were accepted. No two groups are alike."""
    slot = (await node.post("uploads", {"policy_version": node.version})).json()
    rows = [
        replace(r, reward=score(r.sample_index), span_versions=[node.version if version is None else version])
        for r in node.rollouts(items)
    ]
    put, data = UploadSlot.model_validate(slot), encode(rows)
    await node.put(put, data)
    done = await node.commit(put, data, [i.id for i in items])
    assert done.status_code == 200, done.text
    return list(done.json()["accepted"])


async def produce(node: Node_, score: Score, count: int = 100) -> list[str]:
    items, _ = await node.work(count)
    return await answer(node, items, score) if items else []


async def running(world: World, nodes: int, **job: object) -> tuple[str, Learner, list[Node_]]:
    wanted = {"batch": {"prompts": 8, "group_size": 8}, "stop": {"steps": 1000}, "trust": ALL, **job}
    job_id = await world.create(**wanted)
    learner = await world.ready_learner(job_id, nodes)
    await world.round()
    await world.round(10)
    return job_id, learner, [await world.join(r) for r in [r for r in world.provider.live() if r.env][:nodes]]


@BOTH
async def test_a_twin_goes_to_another_node_and_takes_no_place_of_the_order(control: World) -> None:
    job_id, learner, (one, two) = await running(control, 2)
    (first,), _ = await one.work(1)
    # Nor is it given to who has the other one, however much is asked for.
    more, _ = await one.work(2)
    (again,), _ = await two.work(1)
    rows = await control.items(job_id)
    order = [prompt_at(0, ordinal, 50) for ordinal in range(8)]
    assert [first.prompt_index, *(i.prompt_index for i in more)] == order[: 1 + len(more)]
    assert again.prompt_index in order[: 1 + len(more)]
    assert again.id not in {first.id, *(i.id for i in more)}
    assert [r.ordinal for r in rows if r.ordinal >= 0] == list(range(1 + len(more)))
    assert all(rows[i].prompt_index == prompt_at(0, -1 - rows[i].ordinal, 50) for i in range(len(more) + 1))
    assert await answer(one, [first], honest) == [first.id]
    assert await answer(two, [again], honest) == [again.id]
    # Both are work like any other.
    assert {g for ref in await learner.poll() for g in ref.work_items} == {first.id, again.id}
    await learner.train([first.id, again.id])
    assert Counter(r.status for r in await control.items(job_id))["trained"] == 2
    assert (await control.job(job_id))["step"] == 1


async def test_nothing_that_a_node_is_told_tells_a_twin(control: World) -> None:
    """The job's seed is known to nodes, who make its prompts; so are all rules."""
    job_id, _, (one, two) = await running(control, 2)
    firsts, _ = await one.work(2)
    seconds: list[WorkItem] = []
    while {i.prompt_index for i in firsts} - {i.prompt_index for i in seconds}:
        seconds += (await two.work(1))[0]
    kinds = {row.id: row.ordinal < 0 for row in await control.items(job_id)}
    both = [*firsts, *seconds]
    assert {kinds[i.id] for i in both} == {True, False}
    known = {item_seed(0, ordinal) for ordinal in range(200)}
    for item in both:
        assert re.fullmatch(rf"{job_id}-[0-9a-f]{{16}}", item.id)
        assert 0 <= item.seed < 2**63
        assert item.seed not in known
    told = [item.model_dump(exclude={"id", "seed", "prompt_index"}) for item in both]
    assert all(one == told[0] for one in told)
    assert len({i.seed for i in both}) == len({i.id for i in both}) == len(both)


async def test_a_single_node_gets_no_twins(control: World) -> None:
    _, _, (one, *others) = await running(control, 1)
    assert not others
    assert len(await produce(one, honest)) > 0
    assert await twins(control) == []


@pytest.mark.parametrize(
    "job",
    [
        {"trust": {"twin_share": 0}},
        {"batch": {"prompts": 8, "group_size": 8, "prune": "shuffle_r1"}},
        {"rewards": "learner", "learner": {"eval_by": "learner"}},
    ],
)
async def test_jobs_that_have_none(control: World, job: dict[str, object]) -> None:
    _, _, (one, _) = await running(control, 2, **job)
    assert (await one.work(4))[0]
    assert await twins(control) == []


async def test_a_twin_has_the_size_of_its_group(control: World) -> None:
    job_id, _, (one, two) = await running(
        control, 2, batch={"prompts": 4, "group_size": 4, "group_policy": "cures", "max_group": 8}
    )
    firsts, _ = await one.work(4)
    again, _ = await two.work(1)
    sizes = {i.prompt_index: i.group_size for i in firsts}
    assert again[0].group_size == sizes[again[0].prompt_index]
    rows = [r for r in await control.items(job_id) if r.ordinal >= 0]
    assert sum(r.group_size or 0 for r in rows[:4]) == 16


@BOTH
async def test_who_sends_the_best_of_several_answers_is_convicted_and_nobody_else(control: World) -> None:
    job_id, learner, nodes = await running(control, 3)
    liar, *others = nodes
    scores = {liar.id: chosen, **{n.id: honest for n in others}}
    for _ in range(30):
        done = [g for node in nodes for g in await produce(node, scores[node.id], 3)]
        await learner.train(done)
        await learner.publish(learner.step)
        for node in nodes:
            node.version = learner.step
            await node.beat()
        row = await control.node_row(liar.id)
        if row.caught:
            break
    assert row.caught is not None
    assert row.caught.startswith("chosen: its rewards are higher than those of 2 other nodes")
    left = await produce(liar, chosen, 2)
    (shown,) = [n for n in (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"] if n["id"] == liar.id]
    assert 5 < shown["twins"] == row.twins < 60
    assert shown["twin_doubt"] == row.twin_doubt > 14
    await control.round()
    row = await control.node_row(liar.id)
    assert row.quarantined_at == control.clock()
    (event,) = [e for e in await control.events(job_id) if e.kind == "node_quarantined"]
    assert (event.data["node"], "chosen: its rewards are higher" in event.message) == (liar.id, True)
    assert {r.status for r in await control.items(job_id) if r.id in left} <= {"pending"}
    for node in others:
        assert (await control.node_row(node.id)).caught is None


async def test_of_two_nodes_none_is_convicted(control: World) -> None:
    """Which of the two it is, nobody can say."""
    _, learner, (liar, other) = await running(control, 2)
    for _ in range(25):
        await learner.train([*await produce(liar, chosen, 4), *await produce(other, honest, 4)])
        await learner.publish(learner.step)
        liar.version = other.version = learner.step
    rows = [await control.node_row(n.id) for n in (liar, other)]
    assert [r.caught for r in rows] == [None, None]
    assert all(r.twins > 20 and r.twin_doubt > 14 for r in rows)


async def test_what_a_liar_answered_is_not_held_against_others(control: World) -> None:
    _, learner, (one, liar, three) = await running(control, 3)
    items, _ = await liar.work(1)
    await answer(liar, items, chosen)
    body = {"node_id": liar.id, "work_item": items[0].id, "version": 0, "verdict": "failed", "fault": "reward"}
    assert (await learner.post("audits", {"audits": [body]})).status_code == 200
    # The twin is answered by one, the group itself by another one anew.
    for _ in range(4):
        await produce(one, honest, 1)
        await produce(three, honest, 1)
    (compared,) = [t for t in await twins(control) if t.first == items[0].id]
    assert {compared.first_node, compared.second_node} == {one.id, three.id}
    assert max(compared.rise + compared.fall) <= 0.0


async def test_a_group_that_is_given_out_again_is_not_for_who_has_its_twin(control: World) -> None:
    _, _, (one, two, three) = await running(control, 3)
    (first,), _ = await one.work(1)
    (twin,) = await twins(control)
    assert len(twin.wanted) == 1
    two, three = sorted((two, three), key=lambda node: node.id not in twin.wanted)
    # It waits for whom it is meant for.
    assert twin.second not in {i.id for i in (await three.work(1))[0]}
    (second,), _ = await two.work(1)
    assert second.id == twin.second
    body = {"kind": "handed_back", "detail": "", "work_items": [first.id]}
    assert (await one.post("reports", body)).status_code == 204
    assert first.id not in {i.id for i in (await two.work(8))[0]}
    assert first.id in {i.id for _ in range(8) for i in (await three.work(1))[0]}


async def test_groups_that_several_nodes_wrote_are_not_compared(control: World) -> None:
    _, _, (one, two) = await running(control, 2)
    (first,), _ = await one.work(1)
    (second,), _ = await two.work(1)
    async with control.svc.core.db.write() as session:
        (await session.get_one(WorkItemRow, second.id)).written_by = ["node_gone"]
    await answer(one, [first], honest)
    await answer(two, [second], chosen)
    (twin,) = await twins(control)
    assert twin.compared_at is None
    assert (await control.node_row(one.id)).twins == 0


async def test_a_node_that_is_left_alone_has_both_and_is_not_compared_with_itself(control: World) -> None:
    _, _, (one, two) = await running(control, 2)
    (first,), _ = await one.work(1)
    (twin,) = await twins(control)
    await two.leave()
    more, _ = await one.work(4)
    assert twin.second in {i.id for i in more}
    assert await answer(one, [first], honest) == [first.id]
    assert twin.second in await answer(one, more, chosen)
    assert [t.compared_at for t in await twins(control)] == [None]
    row = await control.node_row(one.id)
    assert (row.twins, row.twin_doubt) == (0, 0.0)


async def test_what_versions_far_apart_say_counts_for_less(control: World) -> None:
    _, learner, (one, two) = await running(control, 2, staleness_budget=10)
    (first,), _ = await one.work(1)
    for version in range(1, 5):
        await learner.train([])
        await learner.publish(version)
    two.version = 4
    await two.beat()
    (second,), _ = await two.work(1)
    await answer(one, [first], honest)
    await answer(two, [second], chosen)
    (twin,) = [t for t in await twins(control) if t.compared_at is not None]
    expected = compare([honest(i) for i in range(8)], [1.0] * 8, 4)
    assert (twin.rise, twin.fall) == (pytest.approx(expected.rise), pytest.approx(expected.fall))
    assert max(twin.fall) < max(compare([honest(i) for i in range(8)], [1.0] * 8, 0).fall)


async def test_an_answer_too_late_to_be_trained_on_still_says_what_it_says(control: World) -> None:
    """Long answers come late: without them those of slow nodes would look better than they are."""
    _, learner, (one, two) = await running(control, 2, staleness_budget=1)
    (first,), _ = await one.work(1)
    (second,), _ = await two.work(1)
    assert await answer(one, [first], honest) == [first.id]
    await learner.train([first.id])
    await learner.publish(1)
    await learner.train([])
    assert await answer(two, [second], chosen) == []
    (twin,) = await twins(control)
    assert twin.compared_at is not None
    assert max(twin.fall) > 0 > max(twin.rise[-1:])


async def test_twins_that_nobody_took_are_forgotten_when_there_is_nothing_to_compare(control: World) -> None:
    job_id, learner, (one, two) = await running(control, 2, staleness_budget=1)
    got, _ = await one.work(2)
    assert len(await twins(control)) == len(got)
    await two.leave()
    await answer(one, got, honest)
    await learner.train([i.id for i in got])
    await learner.train([])
    await learner.publish(2)
    one.version = 2
    more, _ = await one.work(2)
    order = [prompt_at(0, ordinal, 50) for ordinal in range(8)]
    assert [i.prompt_index for i in more] == order[len(got) : len(got) + len(more)]
    assert await twins(control) == []
    assert all(row.ordinal >= 0 for row in await control.items(job_id))
