"""Continuous work: a full engine, groups on their way as they finish, swaps, deaths, drains."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.protocol import partial, trajectory
from app.protocol.errors import BadInput, Gone, TaskFailed
from app.rollout_agent import flow, stream
from app.rollout_agent.delivery import HOPELESS_AFTER_S
from app.rollout_agent.ledger import WorkerFault
from app.rollout_agent.stream import UNSCORED
from app.tasks.base import Prompt, Reply
from tests.unit.rollout_agent.fake_stream import GROUP, MAX_TOKENS, Desk, FakeStream, Shift, in_one_go
from tests.unit.rollout_agent.fakes import Echo, accept, problem, rows_of


def whole_and_right(rows: list[trajectory.Rollout], items: list[str]) -> None:
    """Each of these items has its whole group, and every sample is what comes of its prompt in one go."""
    assert Counter(row.work_item for row in rows) == dict.fromkeys(items, GROUP)
    assert {(row.work_item, row.sample_index) for row in rows} == {(i, s) for i in items for s in range(GROUP)}
    for row in rows:
        assert (list(row.completion_ids), list(row.logprobs)) == in_one_go(row.prompt_ids)
        assert row.finish_reason in ("stop", "length")


async def filled(shift: Shift) -> None:
    """Wait until as much is in flight as there should be; work is asked for when an eighth of the target is free."""
    least = shift.worker.target - max(GROUP, shift.worker.target // 8)
    await shift.until(lambda: shift.worker.in_flight > least, "filled", steps=False)


async def test_groups_are_handed_in_as_they_finish_and_wait_for_nobody() -> None:
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.desk.leased) == 4, "all is leased")
        await shift.until(lambda: len(shift.engine.running) == 4 * GROUP, "all is being sampled", steps=False)
        lengths = {item: len(in_one_go([ord(c) for c in f"p{n}"])[0]) for n, item in enumerate(shift.desk.leased)}
        first = min(lengths.values())
        assert first < max(lengths.values()), "the case needs groups of different lengths"
        for _ in range(first):
            shift.engine.step()
        early = {item for item, length in lengths.items() if length == first}
        await shift.until(lambda: early <= set(shift.desk.committed), "the short ones are committed", steps=False)
        assert set(shift.desk.committed) == early
        assert shift.engine.running, "while the others are being sampled"
        await shift.until(lambda: len(shift.desk.committed) == 4, "all is committed")
        await shift.drained()
    whole_and_right(shift.desk.rows, list(shift.desk.leased))
    assert shift.ledger.in_flight == 0
    assert shift.ledger.tokens_generated == sum(len(row.completion_ids) for row in shift.desk.rows)
    assert not shift.ledger.tokens_wasted
    assert [body["policy_version"] for body in shift.desk.wire.of("uploads")] == [0] * len(shift.desk.wire.files)


async def test_every_sample_has_a_seed_of_its_own() -> None:
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.desk.committed) == 4, "all is committed")
    assert len(set(shift.engine.seeds)) == len(shift.engine.seeds) == 4 * GROUP


async def test_the_engine_is_kept_full_as_far_as_it_has_room() -> None:
    seats = 40
    async with Shift(FakeStream(seats=seats), Desk()) as shift:
        low, high = [], []
        for look in range(40):
            await shift.worker.look()
            target = shift.worker.target
            await filled(shift)
            for _ in range(6):
                shift.engine.step()
                await asyncio.sleep(0.002)
                low.append(len(shift.engine.running))
            if look >= 15:
                high.append(target)
        assert max(high) <= seats * 1.75
        assert min(high) >= seats * 0.75
    assert shift.engine.most <= 2 * seats


async def test_an_engine_that_puts_requests_back_gets_fewer() -> None:
    async with Shift(FakeStream(), Desk()) as shift:
        for _ in range(4):
            await shift.worker.look()
            await filled(shift)
        before = shift.worker.target
        shift.engine.preemptions += 1
        shift.engine.cache_used = 0.8
        await shift.worker.look()
        after = shift.worker.target
        assert after < before
        await shift.until(lambda: shift.worker.in_flight <= after, "fewer are in flight")


async def test_a_new_version_waits_for_no_sample_and_spans_tell_of_it() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=2)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 2 * GROUP, "all is being sampled", steps=False)
        for _ in range(10):
            shift.engine.step()
        await shift.engine.install(None, None, 1)  # type: ignore[arg-type]
        shift.version = 1
        shift.worker.installed()
        assert len(shift.engine.running) == 2 * GROUP, "they go on"
        await shift.until(lambda: len(shift.desk.committed) == 2, "all is committed")
    rows = shift.desk.rows
    assert {(tuple(row.span_versions), tuple(row.span_starts)) for row in rows} == {((0, 1), (0, 10))}
    assert {body["policy_version"] for body in shift.desk.wire.of("uploads")} == {0}, "the oldest counts"


async def test_samples_that_a_swap_cuts_are_asked_for_again_from_where_they_were() -> None:
    async with Shift(FakeStream(on_swap="resubmit"), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 4 * GROUP, "all is being sampled", steps=False)
        for version in (1, 2):
            for _ in range(3):
                shift.engine.step()
            alive = [run for run in shift.engine.running if not run.done.done()]
            await shift.engine.install(None, None, version)  # type: ignore[arg-type]
            shift.version = version
            again = shift.engine.asked + len(alive)
            await shift.until(lambda again=again: shift.engine.asked == again, "asked again", steps=False)  # type: ignore[misc]
        await shift.until(lambda: len(shift.desk.committed) == 4, "all is committed")
    whole_and_right(shift.desk.rows, [f"w{n}" for n in range(4)])
    long = [row for row in shift.desk.rows if len(row.completion_ids) > 6]
    assert long, "the case needs samples that saw both swaps"
    assert {(tuple(row.span_versions), tuple(row.span_starts)) for row in long} == {((0, 1, 2), (0, 3, 6))}
    assert len(set(shift.engine.seeds)) == len(shift.engine.seeds), "a piece does not repeat the random numbers before"
    assert shift.ledger.tokens_generated == sum(len(row.completion_ids) for row in shift.desk.rows)
    assert not shift.ledger.tokens_wasted


async def test_an_engine_that_cuts_for_ever_without_a_token_is_a_fault() -> None:
    async with Shift(FakeStream(), Desk(left=1)) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        async with asyncio.timeout(15):
            while "engine_error" not in shift.ledger.errors:
                await shift.engine.abort()
                await asyncio.sleep(0.001)
    assert shift.desk.committed == []
    assert shift.ledger.unfinished() == ["w0"]


async def test_samples_outlive_the_engine_and_its_lost_tokens_are_counted() -> None:
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 4 * GROUP, "all is being sampled", steps=False)
        shift.engine.step()
        shift.engine.step()
        alive = len([run for run in shift.engine.running if not run.done.done()])
        shift.engine.die(lost=2)
        await shift.until(lambda: len(shift.desk.committed) == 4, "all is committed")
    whole_and_right(shift.desk.rows, [f"w{n}" for n in range(4)])
    assert shift.revived == 1
    assert shift.ledger.tokens_wasted == {"engine_died": 2 * alive}
    kept = sum(len(row.completion_ids) for row in shift.desk.rows)
    assert shift.ledger.tokens_generated == kept + 2 * alive


async def test_nothing_is_asked_of_an_engine_without_a_version() -> None:
    release = asyncio.Event()
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 4 * GROUP, "all is being sampled", steps=False)

        async def held() -> None:
            await release.wait()
            shift.engine.version = 0

        shift.revive = held
        asked = shift.engine.asked
        shift.engine.die()
        await shift.until(lambda: not shift.engine.running, "all has died", steps=False)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert shift.engine.asked == asked
        release.set()
        await shift.until(lambda: len(shift.desk.committed) == 4, "all is committed")


async def test_an_engine_that_can_t_be_revived_ends_the_worker() -> None:
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: bool(shift.engine.running), "work is being sampled", steps=False)

        async def hopeless() -> None:
            raise WorkerFault("the engine has died and can't be loaded again")

        shift.revive = hopeless
        shift.engine.die()
        with pytest.raises(WorkerFault, match="loaded again"):
            await asyncio.wait_for(shift.life, 15)


async def test_a_drain_finishes_what_ends_in_time() -> None:
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 4 * GROUP, "all is being sampled", steps=False)
        asked = len(shift.desk.wire.of("work"))
        shift.desk.left = 100
        shift.worker.drain(30.0)
        await shift.until(lambda: shift.life.done(), "it has ended")
        await shift.life
    assert sorted(shift.desk.committed) == ["w0", "w1", "w2", "w3"]
    assert len(shift.desk.wire.of("work")) <= asked + 1, "nothing more is leased"
    assert shift.ledger.unfinished() == []
    assert shift.desk.wire.of("partials") == []


async def test_what_a_drain_cuts_is_handed_over_and_finished_elsewhere_as_in_one_go() -> None:
    async with Shift(FakeStream(), Desk(left=4)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 4 * GROUP, "all is being sampled", steps=False)
        for _ in range(5):
            shift.engine.step()
        short = [f"w{n}" for n in range(4) if len(in_one_go([ord(c) for c in f"p{n}"])[0]) <= 5]
        await shift.until(lambda: sorted(shift.desk.committed) == short, "short ones are in", steps=False)
        await shift.drained()
    [handed] = shift.desk.wire.of("partials")
    assert sorted([*handed["work_items"], *short]) == [f"w{n}" for n in range(4)]
    assert shift.ledger.unfinished() == [], "they are somebody else's now"
    assert not shift.ledger.tokens_wasted
    begun = rows_of(shift.desk.wire.files[-1])
    assert {(row.finish_reason, len(row.completion_ids)) for row in begun} == {("abort", 5)}

    second = Desk(left=0)
    second.leased = {item: shift.desk.leased[item] for item in handed["work_items"]}
    reference = second.reference(shift.desk.wire.files[-1])
    second.partials = dict.fromkeys(handed["work_items"], reference)
    engine = FakeStream()
    engine.version = 3
    async with Shift(engine, second) as other:
        other.version = 3
        await other.until(lambda: len(second.committed) == len(begun) // GROUP, "all is committed")
        await other.drained()
    whole_and_right(second.rows, handed["work_items"])
    assert {(tuple(row.span_versions), tuple(row.span_starts)) for row in second.rows} == {((0, 3), (0, 5))}
    assert other.ledger.tokens_generated == sum(len(row.completion_ids) - 5 for row in second.rows)
    assert not set(engine.seeds) & set(shift.engine.seeds)


async def test_finished_samples_of_a_cut_group_are_handed_over_with_it() -> None:
    async with Shift(FakeStream(), Desk(left=1)) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        shift.engine.step()
        shift.engine._end(shift.engine.running[2], "length")
        await shift.until(lambda: len(shift.engine.running) == GROUP - 1, "one is finished", steps=False)
        await shift.drained()
    rows = rows_of(shift.desk.wire.files[0])
    assert [(row.sample_index, row.finish_reason) for row in rows] == [
        (0, "abort"), (1, "abort"), (2, "length"), (3, "abort"),
    ]  # fmt: skip
    table = trajectory.read_table(shift.desk.wire.files[0])
    partial.validate(table, {"w0": trajectory.Expected(0, GROUP)}, newest_version=0, max_tokens=MAX_TOKENS)


async def test_a_drain_that_becomes_urgent_does_not_wait() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=2)) as shift:
        await shift.until(lambda: len(shift.engine.running) == 2 * GROUP, "all is being sampled", steps=False)
        shift.engine.step()
        shift.worker.drain(600.0)
        await asyncio.sleep(0.01)
        assert not shift.life.done()
        await shift.drained(0.0)
    assert len(shift.desk.wire.of("partials")) == 1


async def test_an_engine_that_does_not_cut_keeps_nobody_waiting() -> None:
    engine = FakeStream(odds=1000)
    async with Shift(engine, Desk(left=1)) as shift:
        await shift.until(lambda: len(engine.running) == GROUP, "it is being sampled", steps=False)
        engine.step()
        engine.deaf = True
        await shift.drained()
    assert shift.ledger.unfinished() == ["w0"], "it is handed back without what the engine keeps"


async def test_what_nobody_takes_over_is_handed_back_and_counted_as_wasted() -> None:
    desk = Desk(left=2, partials=lambda _: problem("trajectory_refused", 422, reason="versions"))
    async with Shift(FakeStream(odds=1000), desk) as shift:
        await shift.until(lambda: len(shift.engine.running) == 2 * GROUP, "all is being sampled", steps=False)
        for _ in range(3):
            shift.engine.step()
        await shift.drained()
    assert sorted(shift.ledger.unfinished()) == ["w0", "w1"]
    assert shift.ledger.tokens_wasted == {"interrupted": 3 * 2 * GROUP}


async def cancelled(shift: Shift) -> None:
    """Its node ends without a drain."""
    shift.life.cancel()
    await asyncio.gather(shift.life, return_exceptions=True)
    assert shift.engine.running == [], "its samples were given up"


async def test_a_worker_that_is_cancelled_hands_over_what_is_unfinished() -> None:
    async with Shift(FakeStream(), Desk()) as shift:
        await shift.until(lambda: len(shift.desk.committed) >= 12, "work is committed")
        await cancelled(shift)
    [handed] = shift.desk.wire.of("partials")
    whole = [row for row in shift.desk.rows if row.work_item not in handed["work_items"]]
    whole_and_right(whole, shift.desk.committed)
    assert not set(shift.ledger.unfinished()) & {row.work_item for row in shift.desk.rows}
    assert not shift.ledger.tokens_wasted
    assert shift.ledger.tokens_generated == sum(len(row.completion_ids) for row in shift.desk.rows)


async def test_what_a_cancelled_worker_can_t_hand_over_is_counted_as_wasted() -> None:
    desk = Desk(partials=lambda _: problem("gone", 410))
    async with Shift(FakeStream(), desk) as shift:
        await shift.until(lambda: len(desk.committed) >= 12, "work is committed")
        await cancelled(shift)
    committed = sum(len(row.completion_ids) for row in desk.rows if row.work_item in desk.committed)
    wasted = shift.ledger.tokens_wasted
    # A group may have become whole, and not been handed in yet, when the end came.
    assert {"interrupted"} <= set(wasted) <= {"interrupted", "refused"}
    assert shift.ledger.tokens_generated == committed + sum(wasted.values())
    assert shift.ledger.unfinished(), "they are handed back as the node leaves"


async def test_of_an_engine_that_hangs_what_is_known_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LEAST_CUT_S", 0.05)
    engine = FakeStream(on_swap="resubmit", odds=1000)
    async with Shift(engine, Desk(left=1)) as shift:
        await shift.until(lambda: len(engine.running) == GROUP, "it is being sampled", steps=False)
        for _ in range(3):
            engine.step()
            shift.clock.now += 0.5
        await engine.install(None, None, 1)  # type: ignore[arg-type]
        await shift.until(lambda: engine.asked == 2 * GROUP, "it is asked for again", steps=False)
        engine.deaf = True
        shift.clock.now += 2.0
        await cancelled(shift)
    assert [len(row.completion_ids) for row in rows_of(shift.desk.wire.files[0])] == [3] * GROUP
    assert shift.ledger.tokens_wasted == {"interrupted": GROUP * 4}, "two a second, by what came before"
    assert shift.ledger.tokens_generated == GROUP * (3 + 4)


async def test_after_a_drain_that_took_too_long_nothing_is_begun_any_more() -> None:
    release = asyncio.Event()
    engine = FakeStream(odds=1000)

    async def slow() -> None:
        await release.wait()

    async with Shift(engine, Desk(left=1)) as shift:
        await shift.until(lambda: len(engine.running) == GROUP, "it is being sampled", steps=False)
        engine.step()
        engine._end(engine.running[0], "length")
        await shift.until(lambda: len(engine.running) == GROUP - 1, "one is finished", steps=False)
        engine.abort = slow  # type: ignore[method-assign]
        shift.worker.drain(0.0)
        await asyncio.sleep(0)
        await cancelled(shift)
    assert shift.desk.wire.of("partials") == []
    assert shift.ledger.tokens_wasted == {"interrupted": shift.ledger.tokens_generated}
    assert shift.ledger.unfinished() == ["w0"]


async def test_groups_too_old_to_be_trained_on_are_given_up() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=1)) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        shift.engine.step()
        shift.floor = 0
        await shift.worker.look()
        assert len(shift.engine.running) == GROUP, "version 0 is admissible"
        shift.floor = 1
        await shift.worker.look()
        await shift.until(lambda: not shift.engine.running, "it is given up", steps=False)
        assert shift.worker.in_flight == 0
        assert shift.ledger.unfinished() == ["w0"]
        assert not shift.life.done()


async def test_a_group_whose_lease_is_long_over_is_given_up() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=1)) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        shift.clock.now += 60 + HOPELESS_AFTER_S - 1
        await shift.worker.look()
        assert len(shift.engine.running) == GROUP
        shift.clock.now += 2
        await shift.worker.look()
        await shift.until(lambda: not shift.engine.running, "it is given up", steps=False)


async def test_a_group_that_comes_back_to_the_node_that_is_at_it_is_sampled_once() -> None:
    desk = Desk(left=1)
    async with Shift(FakeStream(odds=1000), desk) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "all is being sampled", steps=False)
        shift.clock.now += 61
        desk.partials = {"w0": None}  # type: ignore[dict-item]
        asked = len(desk.wire.of("work"))
        await shift.until(lambda: len(desk.wire.of("work")) > asked + 2, "it was leased again", steps=False)
        assert shift.worker.in_flight == GROUP
        shift.clock.now += 59.5 + HOPELESS_AFTER_S
        await shift.worker.look()
        await shift.until(lambda: desk.committed == ["w0"], "it is in time by its new lease")
        await shift.drained()
    assert shift.engine.asked == GROUP
    assert shift.ledger.in_flight == 0


async def test_a_prompt_that_the_engine_refuses_ends_its_group_only() -> None:
    async with Shift(FakeStream(), Desk(left=3)) as shift:
        shift.engine.refuses = "p1"
        await shift.until(lambda: len(shift.desk.committed) == 2, "the others are committed")
        assert sorted(shift.desk.committed) == ["w0", "w2"]
        assert shift.ledger.unfinished() == ["w1"]
        assert shift.ledger.errors["engine_error"] == 1
        reports = [(r["kind"], r["work_items"]) for r in shift.desk.wire.of("reports")]
        assert reports == [("engine_error", ["w1"])], "somebody else may try it at once"


async def test_a_prompt_that_its_task_can_not_make_is_no_fault_of_the_engine() -> None:
    class Gap(Echo):
        def train(self, index: int) -> Prompt:
            if index == 1:
                raise TaskFailed("hung")
            return super().train(index)

    async with Shift(FakeStream(), Desk(left=3), task=Gap()) as shift:
        await shift.until(lambda: len(shift.desk.committed) == 2, "the others are committed")
        await shift.until(lambda: len(shift.desk.wire.of("reports")) == 1, "it is reported", steps=False)
        assert shift.ledger.errors == {"task_error": 1}
        assert [(r["kind"], r["subject"]) for r in shift.desk.wire.of("reports")] == [("task_error", "w1")]
        assert shift.ledger.faults_in_a_row == 0


async def test_a_failed_reward_is_no_zero_and_no_fault_by_itself() -> None:
    task = Echo({1: TaskFailed("hung"), 2: ZeroDivisionError()})
    async with Shift(FakeStream(), Desk(left=4), task=task) as shift:
        await shift.until(lambda: len(shift.desk.committed) == 2, "the others are committed")
        await shift.until(lambda: len(shift.desk.wire.of("reports")) == 2, "both are reported", steps=False)
        assert shift.ledger.errors == {"task_error": 2}
        lost = sum(GROUP * len(in_one_go([ord(c) for c in f"p{n}"])[0]) for n in (1, 2))
        assert shift.ledger.tokens_wasted == {"task_error": lost}
        assert shift.ledger.faults_in_a_row == 0


async def test_a_task_that_scores_nothing_ends_the_node() -> None:
    task = Echo({n: TaskFailed("broken") for n in range(1000)})
    async with Shift(FakeStream(), Desk(), task=task) as shift:
        await shift.until(lambda: shift.life.done(), "it has ended")
        with pytest.raises(WorkerFault, match="scored"):
            await shift.life
    assert shift.ledger.errors["task_error"] >= UNSCORED
    assert shift.desk.committed == []
    handed = sum(len(row.completion_ids) for row in shift.desk.rows)
    assert handed, "what is unfinished may fare better elsewhere"
    assert set(shift.ledger.tokens_wasted) == {"task_error"}
    assert shift.ledger.tokens_generated == handed + shift.ledger.tokens_wasted["task_error"]


async def test_nobody_goes_on_from_an_engine_whose_files_are_refused() -> None:
    desk = Desk(trajectories=lambda _: problem("trajectory_refused", 422, reason="versions"))
    async with Shift(FakeStream(), desk) as shift:
        await shift.until(lambda: shift.life.done(), "it has ended")
        with pytest.raises(WorkerFault, match="refused"):
            await shift.life
    assert desk.wire.of("partials") == []
    assert set(shift.ledger.tokens_wasted) >= {"refused"}
    assert shift.ledger.tokens_generated == sum(shift.ledger.tokens_wasted.values())


async def test_finished_groups_share_a_file_after_an_outage() -> None:
    outage = iter(range(6))

    def answer(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(503) if next(outage, None) is not None else accept(body)

    async with Shift(FakeStream(), Desk(left=8, trajectories=answer)) as shift:
        await shift.until(lambda: shift.ledger.in_flight == 0 and len(shift.desk.leased) == 8, "all is settled")
    assert set(shift.desk.committed) == set(shift.desk.leased)


async def test_a_control_service_that_has_ended_the_node_does() -> None:
    async with Shift(FakeStream(), Desk(trajectories=lambda _: problem("gone", 410))) as shift:
        await shift.until(lambda: shift.life.done(), "it has ended")
        with pytest.raises(Gone):
            await shift.life


async def test_nothing_is_leased_before_a_version_is_installed() -> None:
    shift = Shift(FakeStream(), Desk())
    shift.version = None
    async with shift:
        await shift.drained()
    assert shift.desk.wire.calls == []


async def test_a_silent_engine_shows() -> None:
    async with Shift(FakeStream(), Desk(left=1)) as shift:
        assert shift.worker.stalled_s == 0
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        shift.clock.now += 7
        assert shift.worker.stalled_s == 7
        shift.engine.step()
        assert shift.worker.stalled_s == 7, "tokens that nobody sees don't count"
        shift.engine._end(shift.engine.running[0], "length")
        await shift.until(lambda: len(shift.engine.running) == GROUP - 1, "one is finished", steps=False)
        assert shift.worker.stalled_s == 0
        await shift.until(lambda: len(shift.desk.committed) == 1, "all is finished")
        shift.clock.now += 7
        assert shift.worker.stalled_s == 0, "nothing runs"


async def one_of_two_groups_told_the_speed(shift: Shift) -> None:
    """A sample of ten tokens in five seconds is finished, all others go on."""
    await shift.until(lambda: len(shift.engine.running) == 2 * GROUP, "all is being sampled", steps=False)
    for _ in range(10):
        shift.engine.step()
        shift.clock.now += 0.5
    shift.engine._end(shift.engine.running[0], "length")
    await shift.until(lambda: len(shift.engine.running) == 2 * GROUP - 1, "one is finished", steps=False)


async def test_tokens_that_never_came_are_counted_by_the_speed_of_others() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=2)) as shift:
        await one_of_two_groups_told_the_speed(shift)
        assert shift.ledger.tokens_generated == 10
        shift.clock.now += 2.0
        shift.floor = 1
        await shift.worker.look()
        await shift.until(lambda: not shift.engine.running, "both are given up", steps=False)
    # Two tokens a second for seven seconds, by each of the seven others.
    assert shift.ledger.tokens_wasted == {"stale": 10 + 7 * 14}
    assert shift.ledger.tokens_generated == 10 + 7 * 14


async def test_a_sample_that_fails_takes_what_its_group_had_and_that_is_counted() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=2)) as shift:
        await one_of_two_groups_told_the_speed(shift)
        shift.clock.now += 2.0
        shift.engine.running[-1].done.set_exception(BadInput("too long"))
        await shift.until(lambda: len(shift.engine.running) == GROUP - 1, "its group is given up", steps=False)
        await shift.until(lambda: bool(shift.desk.wire.of("reports")), "it is reported", steps=False)
        # Two tokens a second for seven seconds, by each of the three others.
        assert shift.ledger.tokens_wasted == {"engine_died": 3 * 14}
        assert shift.ledger.tokens_generated == 10 + 3 * 14


async def test_turns_that_an_environment_fails_on_are_counted() -> None:
    class Broken(Echo):
        def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
            raise TaskFailed("hung")

    async with Shift(FakeStream(odds=1000), Desk(left=1), task=Broken()) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        for _ in range(10):
            shift.engine.step()
            shift.clock.now += 0.5
        shift.engine._end(shift.engine.running[0], "stop")
        await shift.until(lambda: bool(shift.desk.wire.of("reports")), "it is reported", steps=False)
    assert shift.ledger.tokens_wasted == {"task_error": GROUP * 10}
    assert shift.ledger.tokens_generated == GROUP * 10


async def test_a_died_engine_that_does_not_say_what_it_had_is_judged_by_its_speed() -> None:
    async with Shift(FakeStream(odds=1000), Desk(left=1)) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        shift.engine.step()
        shift.clock.now += 1.0
        shift.engine._end(shift.engine.running[0], "length")
        await shift.until(lambda: len(shift.engine.running) == GROUP - 1, "one is finished", steps=False)
        shift.clock.now += 100.0
        shift.engine.die(lost=0)
        await shift.until(lambda: len(shift.desk.committed) == 1, "all is committed")
    assert shift.ledger.tokens_wasted == {"engine_died": (GROUP - 1) * MAX_TOKENS}, "never more than there could be"


async def test_slow_rewards_hold_back_leases_and_not_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MAX_READY", 3)
    release = threading.Event()

    class Slow(Echo):
        def reward(self, prompt: Prompt, completion_text: str) -> float:
            release.wait(15)
            return 1.0

    desk = Desk()
    async with Shift(FakeStream(), desk, task=Slow()) as shift:
        await shift.until(lambda: len(desk.leased) >= 4 and shift.worker.in_flight == 0, "what is leased is sampled")
        for _ in range(100):
            shift.engine.step()
            await asyncio.sleep(0.001)
        assert len(desk.leased) <= 2 + 4, "what may wait, and what was in flight then"
        release.set()
        await shift.until(lambda: len(desk.committed) > 8, "it goes on")


async def test_an_episode_with_an_environment_is_played_to_its_end_over_a_cut() -> None:
    class Guess(Echo):
        """Says "no" once, and is content then."""

        def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
            return Reply("no") if len(turns) == 1 else None

        def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
            return float(len(turns))

    desk = Desk(left=1)
    async with Shift(FakeStream(on_swap="resubmit", odds=6), desk, task=Guess()) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is being sampled", steps=False)
        for _ in range(3):
            shift.engine.step()
            await asyncio.sleep(0.01)
        await shift.engine.install(None, None, 1)  # type: ignore[arg-type]
        await shift.until(lambda: len(desk.committed) == 1, "it is committed")
    rows = desk.rows
    told = [row for row in rows if row.generated is not None]
    assert told, "the case needs an episode of two turns"
    for row in told:
        foreign = [token for token, own in zip(row.completion_ids, row.written, strict=True) if not own]
        assert foreign == [ord("n"), ord("o")]
        assert row.reward == 2.0
    assert any(len(row.span_versions) == 2 for row in rows)


async def test_an_episode_is_under_way_until_its_last_turn_has_ended() -> None:
    go, asked = threading.Event(), itertools.count(1)
    waiting: list[int] = []

    class Slow(Echo):
        """Takes its time over an answer."""

        def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
            if len(turns) == 1:
                waiting.append(next(asked))
                assert go.wait(15)
            return Reply("no") if len(turns) == 1 else None

        def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
            return float(len(turns))

    desk = Desk(left=1)
    async with Shift(FakeStream(odds=2), desk, task=Slow()) as shift:
        try:
            await shift.until(lambda: len(waiting) == GROUP, "all first turns have ended")
            assert shift.worker.in_flight == GROUP, "what is cut now is no whole episode, and the node is not idle"
        finally:
            go.set()
        await shift.until(lambda: len(desk.committed) == 1, "it is committed")
    assert {row.reward for row in desk.rows} == {2.0}


async def test_slow_environments_hold_up_neither_shared_threads_nor_rewards() -> None:
    go, asked = threading.Event(), itertools.count()
    waiting: list[int] = []

    class Slow(Echo):
        def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
            if prompt.index == 0 and (number := next(asked)) < 3:
                waiting.append(number)
                assert go.wait(15)
            return None

        def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
            return 1.0

    desk = Desk(left=2)
    with ThreadPoolExecutor(1) as shared:
        asyncio.get_running_loop().set_default_executor(shared)
        async with Shift(FakeStream(odds=2), desk, task=Slow()) as shift:
            try:
                await shift.until(lambda: len(waiting) == 3, "three environments think")
                await shift.until(lambda: desk.committed == ["w1"], "the other group is scored and handed in")
                assert await asyncio.wait_for(asyncio.to_thread(threading.get_ident), 15)
            finally:
                go.set()
            await shift.until(lambda: len(desk.committed) == 2, "the slow one is, too")


async def test_what_came_before_a_cut_is_handed_over_even_if_the_engine_is_mute_later() -> None:
    engine = FakeStream(on_swap="resubmit", odds=1000)
    async with Shift(engine, Desk(left=1)) as shift:
        await shift.until(lambda: len(engine.running) == GROUP, "it is being sampled", steps=False)
        for _ in range(3):
            engine.step()
        await engine.install(None, None, 1)  # type: ignore[arg-type]
        await shift.until(lambda: engine.asked == 2 * GROUP, "it is asked for again", steps=False)
        engine.step()
        engine.deaf = True
        await shift.drained()
    rows = rows_of(shift.desk.wire.files[0])
    assert [len(row.completion_ids) for row in rows] == [3] * GROUP
    assert shift.ledger.unfinished() == []
