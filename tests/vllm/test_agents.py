"""Whole agents with a real vLLM under the real service: what comes back, and what becomes of it when one of them ends.

The cases share two engines and happen in this order: each start of a vLLM takes most of a minute. Half of the prompts
have an environment that answers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from app.fleet import admission
from app.protocol import trajectory
from app.protocol.trajectory import Rollout
from app.rollout_agent.engines.base import Completion, Span
from app.storage.models import WorkItem
from tests.unit.rollout_agent.tiny import EOS
from tests.vllm.fleet import GROUP, SILENCE_S, Accepted, Fleet, Machine, fleet
from tests.vllm.processes import counted, host_of
from tests.vllm.test_engine import victim_of
from tests.vllm.turns import TURNS, said
from tests.vllm.world import PYTHON

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
AGREES = 0.02
START_S = 400.0
BEGUN = 100
"""Tokens of an engine with 16 samples, most of which take hundreds."""
MANY = 12
"""Samples side by side, of 16 at most."""
RUNNING = "vllm:num_requests_running{"
MADE, CUT = "vllm:generation_tokens_total{", 'vllm:request_success_total{engine="0",finished_reason="abort"'
VLLM = {
    "ECHO2_ENGINE": "vllm", "ECHO2_VLLM_PYTHON": PYTHON, "ECHO2_VLLM_MAX_SEQUENCES": "16", "ECHO2_THREADS": "1",
    "ECHO2_VLLM_START_TIMEOUT_S": str(START_S),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def at_work(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two machines with vLLM that work under version 0. The second one cuts its samples at a swap."""
    async with fleet(tmp_path_factory.mktemp("fleet")) as made:
        for instance, on_swap in zip(made.unmanned(), ("continue", "resubmit"), strict=True):
            await made.man(instance, **VLLM, ECHO2_VLLM_ON_SWAP=on_swap)
        await made.until_active(2, START_S, version=0)
        yield made


def worst(at_work: Fleet, rows: Iterable[Rollout]) -> float:
    """How far log-probs are at most from those of the versions that the spans name, in nats."""

    def off(row: Rollout) -> float:
        spans = [Span(v, s) for v, s in zip(row.span_versions, row.span_starts, strict=True)]
        made = Completion(list(row.completion_ids), list(row.logprobs), "stop", spans, row.generated)
        return at_work.models.off(list(row.prompt_ids), made)

    return max(off(row) for row in rows)


def from_node(groups: Iterable[Accepted], node: str) -> list[Accepted]:
    return [group for group in groups if group.node == node]


async def at(at_work: Fleet, number: int) -> tuple[Machine, str]:
    """The n-th machine and its node."""
    machine = list(at_work.machines.values())[number]
    (node,) = [n.id for n in await at_work.nodes() if n.id in machine.log]
    return machine, node


async def until_sampling(at_work: Fleet, number: int) -> tuple[Machine, str]:
    """The n-th machine and its node, which has just been given work and has begun it: its engine is full of samples."""
    machine, node = await at(at_work, number)
    await at_work.until_busy(node)
    deadline, before = time.monotonic() + 60, await counted(machine.process.pid, MADE)
    while (
        await counted(machine.process.pid, MADE) < before + BEGUN
        or await counted(machine.process.pid, RUNNING) < MANY
    ):  # fmt: skip
        assert time.monotonic() < deadline, at_work.logs()
        await asyncio.sleep(0.02)
    return machine, node


async def until_one_by_one(at_work: Fleet, node: str) -> None:
    """Of what a node had at one moment, groups are accepted while others of it still run."""
    deadline = time.monotonic() + 60
    while True:
        had = set(await at_work.leased(node))
        await asyncio.sleep(0.1)
        back = had & (await at_work.read()).keys()
        if back and had & set(await at_work.leased(node)):
            return
        assert time.monotonic() < deadline, f"{node} hands all in at once\n{at_work.logs()}"


async def test_groups_come_back_one_by_one_while_others_run(at_work: Fleet) -> None:
    nodes = [node.id for node in await at_work.nodes()]
    await at_work.until(
        lambda: all(len(from_node(at_work.accepted.values(), node)) >= 6 for node in nodes), "groups of both nodes"
    )
    # Nothing may be leased for a moment: all samples of a small model can end at once.
    for node in nodes:
        await until_one_by_one(at_work, node)
    groups = list(at_work.accepted.values())
    assert all(sorted(row.sample_index for row in group.rows) == list(range(GROUP)) for group in groups)
    assert all(list(row.span_versions) == [0] for group in groups for row in group.rows)
    assert worst(at_work, (row for group in groups[:12] for row in group.rows)) <= AGREES


async def test_what_an_environment_says_is_marked_as_written_by_nobody(at_work: Fleet) -> None:
    nodes = [node.id for node in await at_work.nodes()]

    def played(node: str) -> list[Rollout]:
        groups = from_node(at_work.accepted.values(), node)
        return [row for group in groups for row in group.rows if row.generated is not None]

    await at_work.until(
        lambda: all(any(row.reward == TURNS for row in played(node)) for node in nodes), "whole episodes of both nodes"
    )
    encode = AutoTokenizer.from_pretrained(at_work.models.folder).encode
    for row in (row for node in nodes for row in played(node)):
        assert row.prompt_index % 2 == 0
        pairs = zip(row.completion_ids, row.logprobs, row.generated or (), strict=True)
        runs = [(by, [pair[:2] for pair in run]) for by, run in itertools.groupby(pairs, key=lambda pair: pair[2])]
        assert [by for by, _ in runs] == [i % 2 == 0 for i in range(2 * int(row.reward) - 1)]
        for i, (_, run) in enumerate(runs[1::2], 1):
            assert run == [(token, 0.0) for token in encode(said(i))]
        assert all([token for token, _ in run].index(EOS) == len(run) - 1 for _, run in runs[:-1:2])
        assert any(logprob < 0 for _, logprob in runs[-1][1])
    others = [row for group in at_work.accepted.values() for row in group.rows if row.prompt_index % 2]
    assert {(row.generated, row.reward) for row in others} == {(None, 1.0)}


async def test_a_swap_under_load_shows_token_by_token(at_work: Fleet) -> None:
    nodes = [(await at(at_work, number))[1] for number in (0, 1)]

    def over_both(node: str) -> list[Rollout]:
        groups = from_node(at_work.accepted.values(), node)
        return [row for group in groups for row in group.rows if len(row.span_versions) > 1]

    # A swap may meet an engine that has just handed all in.
    for version in range(1, 9):
        await at_work.publish(version)
        await at_work.until_active(2, 60, version=version)
        done = len(at_work.accepted)
        await at_work.until(lambda done=done: len(at_work.accepted) >= done + 12, "work goes on")  # type: ignore[misc]
        if all(over_both(node) for node in nodes):
            break
    for node in nodes:
        rows = over_both(node)
        assert rows, "samples go on over a swap"
        assert all(list(row.span_versions) == sorted(set(row.span_versions)) for row in rows)
        assert all(0 < row.span_starts[1] < len(row.completion_ids) for row in rows)
        assert worst(at_work, rows[:12]) <= AGREES
    assert [node.tokens_wasted for node in await at_work.nodes()] == [{}, {}]
    going_on, cutting = [await counted(machine.process.pid, CUT) for machine in at_work.machines.values()]
    assert going_on == 0, "the first machine's go on in the engine"
    assert cutting > 0, "the second one's are cut and asked for again"


async def test_what_a_terminated_node_had_begun_another_one_finishes(at_work: Fleet) -> None:
    (_, other), newer = await at(at_work, 1), at_work.version + 1
    machine, node = await until_sampling(at_work, 0)
    at_work.away_for_work = True
    machine.process.terminate()
    assert await asyncio.wait_for(machine.process.wait(), 60) == 0, machine.log
    assert machine.descendants() == [], "its vLLM is gone"
    begun: dict[str, WorkItem] = {
        item.id: item for item in await at_work.world.items(at_work.job_id) if item.partial_key is not None
    }
    assert begun, machine.log
    assert {item.partial_node for item in begun.values()} == {node}
    await at_work.publish(newer)
    await at_work.until_active(1, 60, version=newer)
    at_work.away_for_work = False
    await at_work.until(lambda: begun.keys() <= at_work.accepted.keys(), "the other node finishes them")
    for name, item in begun.items():
        group = at_work.accepted[name]
        assert (group.node, group.written_by) == (other, [node])
        held_to_its_beginning(at_work, item, group)
    mixed = [row for name in begun for row in at_work.accepted[name].rows if len(row.span_versions) > 1]
    assert any(row.span_versions[-1] == newer for row in mixed), "one sample of two nodes and two versions"
    gone = await at_work.world.node_row(node)
    assert gone.state == "gone"
    handed_over = sum(item.partial_tokens or 0 for item in begun.values())
    handed_in = sum(row.own_tokens for g in from_node(at_work.accepted.values(), node) for row in g.rows)
    print(f"\n{len(begun)} groups with {handed_over} tokens handed over; of no use: {gone.tokens_wasted}")
    assert gone.tokens_generated == handed_in + handed_over + sum(gone.tokens_wasted.values())


def held_to_its_beginning(at_work: Fleet, item: WorkItem, group: Accepted) -> None:
    """The group goes on from what was handed over, token by token, and agrees with the versions that it names."""
    assert item.partial_key is not None
    table = trajectory.read_table(at_work.objects.ever(item.partial_key))
    before = {r.sample_index: r for r in trajectory.rollouts(table) if r.work_item == item.id}
    after = {row.sample_index: row for row in group.rows}
    assert before
    assert sorted(after) == list(range(GROUP))
    for index, row in before.items():
        whole, size = after[index], len(row.completion_ids)
        assert list(whole.completion_ids)[:size] == list(row.completion_ids)
        assert list(whole.logprobs)[:size] == list(row.logprobs)
        assert list(whole.span_versions)[: len(row.span_versions)] == list(row.span_versions)
        assert (len(whole.completion_ids) > size) == (row.finish_reason == "abort")
    assert worst(at_work, after.values()) <= AGREES


async def books_of(at_work: Fleet, names: set[str]) -> dict[str, tuple[int, int, list[str]]]:
    """How often each was leased and failed, and at whom."""
    items = await at_work.world.items(at_work.job_id)
    return {i.id: (i.attempts, i.failures, i.failed_by) for i in items if i.id in names}


async def test_a_node_whose_engine_is_killed_loads_it_again_and_loses_no_group(
    at_work: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a start of vLLM takes; of nodes as fast as these it would be 20 seconds.
    monkeypatch.setattr(admission, "lease_deadline", lambda **_: START_S)
    version, before = at_work.version, set(await at_work.leased((await at(at_work, 1))[1]))
    machine, node = await until_sampling(at_work, 1)
    host = host_of(machine.process.pid)
    assert host is not None
    os.kill(victim_of(host, "core"), signal.SIGKILL)
    under_way = set(await at_work.leased(node)) - before - (await at_work.read()).keys()
    assert under_way
    books = await books_of(at_work, under_way)
    await at_work.until(lambda: under_way <= at_work.accepted.keys(), "the node finishes them itself", 200)
    assert await books_of(at_work, under_way) == books, "by the same lease, and no failure"
    groups = [at_work.accepted[name] for name in under_way]
    assert {(group.node, *group.written_by) for group in groups} == {(node,)}
    assert all(sorted(row.sample_index for row in group.rows) == list(range(GROUP)) for group in groups)
    assert worst(at_work, (row for group in groups for row in group.rows)) <= AGREES
    assert host_of(machine.process.pid) not in (None, host), "it has another engine"
    assert f"the engine is loaded again, with version {version}" in machine.log
    assert node in [n.id for n in await at_work.until_active(1, 60, version=version)], "it is the same node"
    row = await at_work.world.node_row(node)
    assert row.errors["engine_died"] == 1
    # What it had from before its leases were long may have gone to the other node while it loaded: then it comes late.
    late = any(item.attempts > 1 for item in await at_work.world.items(at_work.job_id) if item.id in before)
    assert row.tokens_wasted["engine_died"] > 0
    assert set(row.tokens_wasted) - {"engine_died"} <= ({"refused"} if late else set()), "and nothing else"


async def test_a_killed_node_loses_only_what_it_had_not_handed_in(at_work: Fleet) -> None:
    # Another engine this time: it is there in seconds, and takes up whatever vLLM leaves.
    (instance,) = at_work.unmanned()
    await at_work.man(instance, ECHO2_THREADS="1")
    both = await at_work.until_active(2, 90)
    machine, node = await at(at_work, 1)
    (heir,) = [n.id for n in both if n.id != node]
    await at_work.until(lambda: bool(from_node(at_work.accepted.values(), heir)), "it works")
    await at_work.until_busy(node)
    machine.process.kill()
    await machine.process.wait()
    lost, kept = await at_work.leased(node), set(await at_work.read())
    assert lost
    assert kept.isdisjoint(lost)
    await at_work.until(lambda: set(lost) <= at_work.accepted.keys(), "they are leased again and answered", 90)
    for name in lost:
        group = at_work.accepted[name]
        assert (group.node, group.written_by) == (heir, [])
        assert sorted(row.sample_index for row in group.rows) == list(range(GROUP))
    assert worst(at_work, (row for name in lost[:3] for row in at_work.accepted[name].rows)) <= AGREES
    assert kept <= at_work.accepted.keys()
    assert (await at_work.world.node_row(node)).state == "lost"
    ended_by = time.monotonic() + SILENCE_S
    while left := machine.descendants():
        assert time.monotonic() < ended_by, f"its vLLM goes on: {left}"
        await asyncio.sleep(0.1)
