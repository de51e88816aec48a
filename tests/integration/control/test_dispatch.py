"""Which groups go to which node and how large they are; copies and replays; tokens of no use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import httpx
import pytest
from sqlalchemy import select, update

from app.fleet.admission import prompt_at
from app.protocol.pruning import informative
from app.protocol.trajectory import Rollout, encode
from app.protocol.work import UploadSlot, WorkItem
from app.storage.models import Job, Node, PromptStats
from app.storage.models import WorkItem as Row
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import GROUP, MU, Learner, Node_, World


async def _answer(node: Node_, items: Sequence[WorkItem], rows: Sequence[Rollout]) -> httpx.Response:
    answer = await node.post("uploads", {"policy_version": node.version})
    slot, data = UploadSlot.model_validate(answer.json()), encode(rows)
    await node.put(slot, data)
    return await node.commit(slot, data, [i.id for i in items])


def _of_length(node: Node_, items: Sequence[WorkItem], length: int, reward: float = 1.0) -> list[Rollout]:
    """Rollouts of so many tokens, no two alike."""
    return [
        replace(r, completion_ids=[n + 1, *range(length - 1)], logprobs=[-2.0] * length, reward=reward)
        for n, r in enumerate(node.rollouts(items))
    ]


async def _know(
    world: World, job_id: str, lengths: dict[int, float], mean: float, successes: dict[int, float] | None = None
) -> None:
    """What the service has learnt of prompts from 1000 completions of each; half of them were right by default."""
    async with world.svc.core.db.write() as session:
        for prompt, length in lengths.items():
            session.add(
                PromptStats(
                    job_id=job_id, prompt_index=prompt, tries=1000, successes=(successes or {}).get(prompt, 500.0),
                    mean_length=length, updated_at=0.0,
                )
            )  # fmt: skip
        await session.execute(update(Job).where(Job.id == job_id).values(length_mean=mean))


@BOTH
async def test_accepted_groups_teach_how_long_and_how_hard_prompts_are(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    items, _ = await node.work(1)
    rows = _of_length(node, items, 6)
    rows[1] = replace(rows[1], reward=-3.0, completion_ids=[9, 9], logprobs=[-2.0, -2.0])
    assert (await _answer(node, items, rows)).json()["accepted"] == [items[0].id]
    async with control.svc.core.db.read() as session:
        (stats,) = list(await session.scalars(select(PromptStats)))
        job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
    assert (stats.prompt_index, stats.tries, stats.successes, stats.mean_length) == (items[0].prompt_index, 2, 1.0, 4.0)
    assert (job.length_mean, job.failure_rate) == (4.0, 0.5)


async def test_groups_predicted_long_go_to_the_fast_node_and_to_the_slow_one_what_it_can_finish(
    control: World,
) -> None:
    # PROMPTS is 2 and a window that looks ahead of what is asked for needs more.
    job_id = await control.create(batch={"prompts": 16}, stop={"steps": 50})
    learner = await control.ready_learner(job_id, 2)
    await control.round()
    await control.round(10)
    fast, slow, *_ = nodes = [await control.join(r) for r in control.provider.live() if r.env]
    order = [prompt_at(0, ordinal, 50) for ordinal in range(8)]
    await _know(control, job_id, {p: 10.0 * (i + 1) for i, p in enumerate(order)}, 45.0)
    await learner.beat()
    await fast.beat(tokens_per_s=10_000.0)
    await slow.beat(tokens_per_s=30.0)
    # Eight prompts are looked at: the longest of them to the fast node, the shortest to the slow one.
    to_fast, _ = await fast.work(1)
    to_slow, _ = await slow.work(1)
    assert [i.prompt_index for i in to_fast] == [order[7]]
    assert [i.prompt_index for i in to_slow] == [order[0]]
    assert [i.ordinal for i in await control.items(job_id)] == list(range(8))
    # Drawn to the job's mean the next shortest has 46 tokens: they would fit into the time in which v0 is admissible,
    # but not with the 28 that are under way.
    time_left = 4 * 16 * GROUP / (MU * len(nodes))
    await slow.beat(tokens_per_s=60 / (0.8 * time_left))
    waits = await slow.ask(1)
    assert waits["items"] == []
    assert waits["reason"].startswith("dispatch: at ")
    assert "28 tokens to sample" in waits["reason"]
    again, _ = await fast.work(1)
    assert [i.prompt_index for i in again] == [order[6]]
    assert (await _answer(slow, to_slow, slow.rollouts(to_slow))).json()["accepted"] == [to_slow[0].id]
    await _know(control, job_id, {}, 45.0)
    then, _ = await slow.work(1)
    assert [i.prompt_index for i in then] == [order[1]]


@pytest.mark.parametrize(("failures", "favourite"), [(0.95, 2), (0.05, 0)])
async def test_coba_favours_what_a_policy_that_fails_or_succeeds_often_can_learn_from(
    control: World, failures: float, favourite: int
) -> None:
    job_id = await control.create(
        batch={"prompts": 3, "group_size": 4, "group_policy": "coba", "max_group": 8}, stop={"steps": 50}
    )
    await control.ready_learner(job_id, 1)
    order = [prompt_at(0, ordinal, 50) for ordinal in range(3)]
    await _know(control, job_id, dict.fromkeys(order, 2.0), 2.0, dict(zip(order, (250, 500, 750), strict=True)))
    async with control.svc.core.db.write() as session:
        await session.execute(update(Job).where(Job.id == job_id).values(failure_rate=failures))
    await control.round()
    await control.round(10)
    node = await control.join(next(r for r in control.provider.live() if r.env))
    items: list[WorkItem] = []
    while len(items) < 3:
        items += (await node.work(1))[0]
    sizes = {i.prompt_index: i.group_size for i in items}
    assert sum(sizes.values()) == 12
    assert max(sizes, key=lambda prompt: sizes[prompt]) == order[favourite]


async def test_group_sizes_follow_the_policy_and_every_count_follows_them(control: World) -> None:
    job_id = await control.create(
        batch={"prompts": 4, "group_size": 4, "group_policy": "cures", "max_group": 8}, stop={"steps": 50}
    )
    learner = await control.ready_learner(job_id, 1)
    order = [prompt_at(0, ordinal, 50) for ordinal in range(4)]
    await _know(control, job_id, dict.fromkeys(order, 2.0), 2.0, dict(zip(order, (500, 1000, 0, 500), strict=True)))
    await control.round()
    await control.round(10)
    node = await control.join(next(r for r in control.provider.live() if r.env))
    items: list[WorkItem] = []
    while len(items) < 4:
        items += (await node.work(1))[0]
    items.sort(key=lambda i: order.index(i.prompt_index))
    assert [i.group_size for i in items] == [6, 2, 2, 6]
    # A group that is not whole by its own size is refused.
    short = [r for r in node.rollouts(items) if r.sample_index < 4]
    refused = await _answer(node, items[:1], [r for r in short if r.work_item == items[0].id])
    assert refused.json()["reason"] == "incomplete_group"
    back, _ = await node.work(1)
    assert [(i.id, i.group_size) for i in back] == [(items[0].id, 6)]
    done = await _answer(node, items, node.rollouts(items))
    assert sorted(done.json()["accepted"]) == sorted(i.id for i in items)
    (ref,) = await learner.poll()
    assert ref.group_sizes == {i.id: i.group_size for i in items}
    assert (await control.node_row(node.id)).rollouts_accepted == 16
    await learner.train([items[0].id, items[1].id], dropped=[{"work_item": items[2].id, "reason": "stale"}])
    (step,) = (await control.get(f"/v1/jobs/{job_id}/steps"))["items"]
    assert (step["rollouts"], step["dropped"]) == (8, 2)
    totals = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]
    assert (totals["rollouts_accepted"], totals["rollouts_trained"], totals["rollouts_dropped"]) == (16, 8, 2)


async def test_a_pruned_group_is_half_as_many_rows_and_counts_as_whole(control: World) -> None:
    job_id = await control.create(batch={"group_size": 8, "prune": "shuffle_r1"}, stop={"steps": 50})
    learner, nodes = await control.running(job_id)
    node = nodes[0]
    assert node.answer.prune == "shuffle_r1"
    items, _ = await node.work(1)
    rows = [replace(r, reward=r.sample_index / 7) for r in node.rollouts(items)]
    assert (await _answer(node, items, rows)).json()["reason"] == "too_many_rows"
    items, _ = await node.work(1)
    left = informative([r.reward for r in rows], "shuffle_r1")
    assert left == [0, 1, 6, 7]
    assert (await _answer(node, items, [rows[i] for i in left])).json()["accepted"] == [items[0].id]
    assert [ref.work_items for ref in await learner.poll()] == [[items[0].id]]
    assert (await control.node_row(node.id)).rollouts_accepted == 8


@BOTH
async def test_a_group_that_was_accepted_before_is_refused_under_another_work_item(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner = await control.ready_learner(job_id, train_prompts=1)
    await control.round()
    await control.round(10)
    node = await control.join(next(r for r in control.provider.live() if r.env))
    first, _ = await node.work(1)
    assert (await _answer(node, first, _of_length(node, first, 10))).json()["accepted"] == [first[0].id]
    second, _ = await node.work(1)
    assert second[0].prompt_index == first[0].prompt_index
    # In another order, and with rewards that are better.
    copy = _of_length(node, second, 10, reward=2.0)
    swapped = [replace(a, sample_index=b.sample_index) for a, b in zip(copy, copy[::-1], strict=True)]
    answer = await _answer(node, second, swapped)
    assert (answer.status_code, answer.json()["reason"]) == (422, "replayed")
    assert first[0].id in answer.json()["detail"]
    again, _ = await node.work(1)
    assert [i.id for i in again] == [second[0].id]
    assert (await _answer(node, again, _of_length(node, again, 11))).json()["accepted"] == [second[0].id]
    # A short confident answer comes as often as it likes.
    assert len(await node.produce(2)) == 2
    assert sum(len(ref.work_items) for ref in await learner.poll()) == 4


async def test_one_completion_that_was_accepted_before_is_enough(control: World) -> None:
    """Of an earlier group one sample was kept and all others are new."""
    job_id = await control.create(stop={"steps": 50})
    await control.ready_learner(job_id, train_prompts=1)
    await control.round()
    await control.round(10)
    node = await control.join(next(r for r in control.provider.live() if r.env))
    first, _ = await node.work(1)
    rows = _of_length(node, first, 15)
    assert (await _answer(node, first, rows)).json()["accepted"] == [first[0].id]
    second, _ = await node.work(1)
    mixed = [replace(rows[0], work_item=second[0].id), *_of_length(node, second, 11)[1:]]
    answer = await _answer(node, second, mixed)
    assert (answer.status_code, answer.json()["reason"]) == (422, "replayed")
    assert first[0].id in answer.json()["detail"]
    row = await control.node_row(node.id)
    assert (row.caught or "").startswith("replayed: 1 completions of work item ")


async def test_two_groups_of_a_file_are_held_against_each_other(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    await control.ready_learner(job_id, train_prompts=1)
    await control.round()
    await control.round(10)
    node = await control.join(next(r for r in control.provider.live() if r.env))
    items = [item for _ in range(2) for item in (await node.work(1))[0]]
    rows = [row for item in items for row in _of_length(node, [item], 10)]
    assert (await _answer(node, items, rows)).json()["reason"] == "replayed"
    assert [i.status for i in await control.items(job_id)] == ["pending", "pending"]


async def test_a_group_that_is_withdrawn_may_be_answered_with_the_same_again(control: World) -> None:
    """What is on record of its first answer is no other group's."""
    job_id = await control.create()
    _, (liar, other) = await control.running(job_id, nodes=2)
    items, _ = await liar.work(1)
    assert (await _answer(liar, items, _of_length(liar, items, 10))).json()["accepted"] == [items[0].id]
    async with control.svc.core.db.write() as session:
        (await session.get_one(Node, liar.id)).caught = "copied: seen by the test"
    await control.round()
    again, _ = await other.work(1)
    assert [i.id for i in again] == [items[0].id]
    assert (await _answer(other, again, _of_length(other, again, 10))).json()["accepted"] == [items[0].id]


async def test_a_group_that_goes_out_again_has_other_random_numbers(control: World) -> None:
    """Who had it before could sample the same answers with the same numbers, and hand them in elsewhere first: the
    honest node would be taken for the copier."""
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    (before,), _ = await one.work(1)
    await one.post("reports", {"kind": "handed_back", "subject": "work", "work_items": [before.id]})
    (after,), _ = await two.work(1)
    assert after.id == before.id
    assert after.seed != before.seed
    assert 0 <= after.seed < 2**63


async def test_a_group_of_copies_is_refused(control: World) -> None:
    job_id = await control.create(batch={"group_size": 8})
    _, nodes = await control.running(job_id)
    node = nodes[0]
    items, _ = await node.work(1)
    rows = [replace(r, completion_ids=[1, 2, 3], logprobs=[-2.0] * 3) for r in node.rollouts(items)]
    answer = await _answer(node, items, rows)
    assert (answer.status_code, answer.json()["reason"]) == (422, "copied")
    again, _ = await node.work(1)
    confident = [replace(r, completion_ids=[1, 2, 3], logprobs=[-0.01] * 3) for r in node.rollouts(again)]
    assert (await _answer(node, again, confident)).json()["accepted"] == [again[0].id]


async def test_tokens_are_counted_by_node_and_job_and_survive_the_node(control: World) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    await one.beat(tokens_generated=100, tokens_wasted={"interrupted": 5})
    await one.beat(tokens_generated=160, tokens_wasted={"interrupted": 5, "stale": 7})
    await two.beat(tokens_generated=40)
    fleet = await control.get(f"/v1/jobs/{job_id}/fleet")
    rows = {n["id"]: (n["tokens_generated"], n["tokens_wasted"]) for n in fleet["nodes"]}
    assert rows == {one.id: (160, {"interrupted": 5, "stale": 7}), two.id: (40, {})}
    answer = await one.post("leave", {"reason": "x", "tokens_generated": 170, "tokens_wasted": {"interrupted": 9}})
    assert answer.status_code == 204
    await control.rounds(2, 10, two, learner)
    totals = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]
    assert (totals["tokens_generated"], totals["tokens_wasted"]) == (210, {"interrupted": 9, "stale": 7})
    text = (await control.http.get("/metrics")).text
    for line in (
        f'echo2_tokens_generated_total{{job="{job_id}"}} 210.0',
        f'echo2_tokens_wasted_total{{job="{job_id}",reason="interrupted"}} 9.0',
        f'echo2_tokens_wasted_total{{job="{job_id}",reason="stale"}} 7.0',
    ):
        assert line in text
    assert (await two.post("heartbeat", {"state": "active", "policy_version": 0, "tokens_wasted": {"boredom": 1}})
            ).status_code == 422  # fmt: skip


@pytest.mark.parametrize(("step", "oldest"), [(0, 0), (3, 0), (5, 2)])
async def test_a_node_is_told_which_versions_are_of_no_use_any_more(control: World, step: int, oldest: int) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    for _ in range(step):
        await learner.train([])
    await node.beat()
    assert node.directives["oldest_admissible"] == oldest


async def test_a_self_test_that_came_out_low_keeps_nobody_from_work(control: World) -> None:
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    await _know(control, job_id, {}, mean=100.0)
    await one.beat(MU, tokens_per_s=1e6)
    assert len((await one.work(1))[0]) == 1
    for probed, count in ((False, 0), (True, 1)):
        await two.beat(MU, tokens_per_s=1e-3, probed=probed)
        assert len((await two.work(1))[0]) == count


async def test_a_fast_node_that_is_behind_with_its_version_is_not_waited_for(control: World) -> None:
    job_id = await control.create(staleness_budget=1, stop={"steps": 50})
    learner, (fast, slow) = await control.running(job_id, nodes=2)
    await fast.beat(MU, tokens_per_s=1e6)
    assert len((await fast.work(1))[0]) == 1
    for step in (1, 2):
        await learner.train([])
        await learner.publish(step)
    slow.version = 2
    await _know(control, job_id, {}, mean=100.0)
    await slow.beat(MU, tokens_per_s=1e-3)
    assert [i.group_size for i in (await slow.work(1))[0]] == [GROUP]


async def test_a_node_that_nobody_has_measured_leaves_most_of_the_work_to_others(control: World) -> None:
    job_id = await control.create(batch={"prompts": 16}, stop={"steps": 50})
    _, (dark, other, *_) = await control.running(job_id, nodes=2)
    await dark.beat(MU, probed=True)
    got: list[WorkItem] = []
    for _ in range(6):
        got += (await dark.work())[0]
    assert len(got) == 4, "a quarter of a batch"
    answer = await dark.ask()
    assert answer["items"] == []
    assert answer["reason"].startswith("dispatch: the speed of this node is not known")
    while items := (await other.work())[0]:
        got += items
    assert len(got) == 16 * 4, "the other may have all the rest"
    # What it hands in makes room for as much.
    mine = got[:1]
    assert (await _answer(dark, mine, dark.rollouts(mine))).json()["accepted"] == [mine[0].id]
    assert len([i for i in await control.items(job_id) if i.node_id == dark.id and i.status == "leased"]) == 3


async def test_a_node_that_nobody_has_measured_gets_few_held_out_prompts_too(control: World) -> None:
    job_id = await control.create(
        batch={"prompts": 8}, stop={"steps": 50}, learner={"eval_every": 1, "eval_samples": 2, "eval_greedy": False}
    )
    learner = await control.ready_learner(job_id, eval_prompts=40)
    await control.round()
    await control.round(10)
    node = await control.join(control.provider.live()[0])
    await learner.train([])
    await learner.publish(1)
    node.version = 1
    await node.beat(MU, probed=True)
    control.clock.advance(60)
    got = [i for _ in range(6) for i in (await node.work())[0]]
    assert "heldout" in {i.split for i in got}
    assert sum(i.group_size for i in got) == 2 * GROUP, "of both kinds, as many answers as two groups have"
    await node.beat()
    assert (await node.work())[0] != []


async def _of_size(control: World, items: Sequence[WorkItem], size: int) -> list[WorkItem]:
    """The same work items as groups of another size."""
    async with control.svc.core.db.write() as session:
        await session.execute(update(Row).where(Row.id.in_([i.id for i in items])).values(group_size=size))
    return [i.model_copy(update={"group_size": size}) for i in items]


async def _step(control: World, learner: Learner, node: Node_, items: Sequence[WorkItem]) -> None:
    """A step on these, all answered; then its version is out and what else was leased is waiting again."""
    assert len((await _answer(node, items, node.rollouts(items))).json()["accepted"]) == len(items)
    await learner.train([i.id for i in items])
    await learner.publish(learner.step)
    node.version = learner.step
    await node.beat(1e4)
    async with control.svc.core.db.write() as session:
        await session.execute(update(Row).where(Row.status == "leased").values(status="pending", node_id=None))


async def _let_out(node: Node_) -> int:
    """How many groups admission lets out now."""
    count = 0
    while items := (await node.work(1))[0]:
        count += len(items)
    return count


@pytest.mark.parametrize("policy", ["uniform", "cures"])
async def test_what_is_let_out_follows_the_groups_that_steps_consumed_and_not_their_rollouts(
    control: World, policy: str
) -> None:
    """Steps of few large groups have as many rollouts as steps of many: more than the batch was let out for those."""
    batch = {"prompts": 4, "group_size": 4, "group_policy": policy}
    if policy != "uniform":
        batch["max_group"] = 8
    job_id = await control.create(batch=batch, staleness_budget=1, stop={"steps": 50})
    learner, (node, *_) = await control.running(job_id)
    await node.beat(1e4)
    for _ in range(3):
        got = [i for _ in range(8) for i in (await node.work(1))[0]][:4]
        if policy != "uniform":
            # As if a window's large groups had all come first.
            got = await _of_size(control, got, 8)
        await _step(control, learner, node, got)
    rollouts = {s["rollouts"] for s in (await control.get(f"/v1/jobs/{job_id}/steps"))["items"]}
    assert rollouts == {16 if policy == "uniform" else 32}
    assert await _let_out(node) == 2 * 4, "two batches of 4 groups, as S is 1: of more the last would be stale"


async def test_what_was_consumed_to_make_up_for_groups_without_a_signal_is_let_out_again(control: World) -> None:
    job_id = await control.create(
        batch={"prompts": 4, "group_size": 4, "group_policy": "cures", "max_group": 8}, staleness_budget=1,
        stop={"steps": 50}, safety_factor=3,
    )  # fmt: skip
    learner, (node, *_) = await control.running(job_id)
    await node.beat(1e4)
    for _ in range(3):
        got = [i for _ in range(8) for i in (await node.work(1))[0]][:6]
        await _step(control, learner, node, await _of_size(control, got, 2))
    assert await _let_out(node) == 2 * 6, "every one of the last steps consumed six groups, though small ones"


@pytest.mark.parametrize("vanishes", [False, True])
async def test_what_a_killed_node_had_under_way_is_reckoned_as_of_no_use(control: World, vanishes: bool) -> None:
    job_id = await control.create()
    learner, (dead, other) = await control.running(job_id, nodes=2)
    items, _ = await dead.work(2)
    async with control.svc.core.db.write() as session:
        await session.execute(update(Job).where(Job.id == job_id).values(length_mean=10.0))
        # Its groups have more time than it is given to be heard of again.
        await session.execute(update(Row).where(Row.status == "leased").values(deadline_at=control.clock() + 1000))
    if vanishes:
        lease = (await control.node_row(dead.id)).lease_id
        instance = next(x.instance_id for x in await control.leases() if x.id == lease)
        control.provider.vanish(instance)
    for _ in range(8):
        control.clock.advance(10)
        await other.beat()
        await learner.beat()
        await control.round()
    assert (await control.node_row(dead.id)).state in ("lost", "gone")
    totals = (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]
    assert totals["tokens_wasted"] == {"node_lost": len(items) * GROUP * 10 // 2}
