"""How the batch worker ends without a drain: what it has is handed in and over, and every token is counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from app.protocol.trajectory import Rollout
from app.rollout_agent import worker
from app.rollout_agent.engines.base import Completion, GenRequest
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault
from app.tasks.base import Prompt, Reply
from tests.unit.rollout_agent.fakes import Echo, ScriptedEngine, accept, problem, rows_of
from tests.unit.rollout_agent.test_episodes import END, Count
from tests.unit.rollout_agent.test_worker import Shift, slot, take


class Turns(ScriptedEngine):
    """Says "a" and ends each turn; from the `at`-th batch on it fails at every second turn."""

    def __init__(self, at: int = 100) -> None:
        super().__init__()
        self.first_turns = 0
        self.delivered = threading.Event()
        """What was sampled before is accepted: faults are counted from there."""
        self._at = at

    def commit(self, body: dict[str, Any]) -> httpx.Response:
        if "w6" in body["work_items"]:
            self.delivered.set()
        return accept(body)

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        first = any(request.start == 0 for request in requests)
        self.first_turns += first
        if not first and self.first_turns >= self._at:
            assert self.delivered.wait(20)
            raise RuntimeError("an illegal memory access")
        return [Completion([97, END], [-0.5, -0.25], "stop") for request in requests for _ in range(request.n)]


class Holding(ScriptedEngine):
    """From its `at`-th batch on it gives nothing until it is interrupted, or, if it is deaf, let go."""

    def __init__(self, at: int, *, deaf: bool = False) -> None:
        super().__init__()
        self.holds, self.let_go = threading.Event(), threading.Event()
        self._at, self._deaf = at, deaf

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        made = super().generate(requests)
        if len(self.batches) < self._at:
            return made
        self.holds.set()
        assert self.let_go.wait(20)
        return [Completion(c.token_ids[:1], c.logprobs[:1], "abort") for c in made]

    def interrupt(self) -> None:
        if not self._deaf:
            self.let_go.set()


def files_of(shift: Shift, call: str) -> list[str]:
    return [item for body in shift.wire.of(call) for item in body["work_items"]]


def written(rows: Sequence[Rollout]) -> int:
    return sum(row.own_tokens for row in rows)


def handed_away(shift: Shift) -> list[Rollout]:
    return [row for file in shift.wire.files for row in rows_of(file)]


async def until(happened: threading.Event) -> None:
    assert await asyncio.to_thread(happened.wait, 20)


async def test_after_too_many_engine_errors_what_was_sampled_of_the_other_groups_is_handed_over() -> None:
    engine = Turns(4)
    shift = Shift(leases=100, max_tokens=40, uploads=slot, partials=take, trajectories=engine.commit)
    shift.engine, shift.task = engine, Count(2)
    with pytest.raises(WorkerFault, match="illegal memory access"):
        await shift.run()
    failed = [item for r in shift.wire.of("reports") if r["kind"] == "engine_error" for item in r["work_items"]]
    assert len(failed) == MAX_FAULTS
    committed, passed_on = files_of(shift, "trajectories"), files_of(shift, "partials")
    assert len(passed_on) == 3, "of eight groups, five were at fault"
    assert set(passed_on).isdisjoint([*failed, *committed])
    cut = [row for row in handed_away(shift) if row.work_item in passed_on]
    assert [row.finish_reason for row in cut] == ["abort"] * 6
    assert all(list(row.completion_ids)[:2] == [97, END] and row.generated is not None for row in cut)
    assert "handed_back" not in {r["kind"] for r in shift.wire.of("reports")}
    # Sampled once: the halves of the batch went on from the first turn.
    assert shift.ledger.tokens_wasted == {"engine_died": MAX_FAULTS * 2 * 2}
    assert shift.ledger.tokens_generated == written(handed_away(shift)) + MAX_FAULTS * 2 * 2
    assert set(shift.ledger.unfinished()) == set(failed)


async def test_of_an_environment_that_fails_over_one_group_no_other_is_sampled_again() -> None:
    class Moody(Count):
        def respond(self, prompt, messages):  # type: ignore[no-untyped-def]
            if prompt.index == 4:
                raise RuntimeError("its world is gone")
            return super().respond(prompt, messages)

    shift = Shift(leases=3, max_tokens=40, uploads=slot)
    shift.engine, shift.task = Turns(), Moody(2)
    await shift.run()
    assert set(files_of(shift, "trajectories")) == {f"w{n}" for n in range(7) if n != 4}
    assert shift.ledger.tokens_generated == written(handed_away(shift)) + sum(shift.ledger.tokens_wasted.values())
    # Of the group at fault only: its first turn as often as it was tried, alone and with others.
    assert shift.ledger.tokens_wasted == {"engine_died": 3 * 2 * 2}


async def test_a_node_whose_engine_hangs_hands_over_what_it_still_tells() -> None:
    shift = Shift(leases=100, uploads=slot, partials=take)
    shift.engine = engine = Holding(3)
    life = asyncio.create_task(shift.run())
    await until(engine.holds)
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert files_of(shift, "trajectories") == ["w0", "w1", "w2"], "what was whole went in"
    assert files_of(shift, "partials") == ["w3", "w4", "w5", "w6"]
    assert shift.ledger.unfinished() == []
    assert not shift.ledger.tokens_wasted
    assert shift.ledger.tokens_generated == written(handed_away(shift))


async def test_an_engine_that_tells_nothing_more_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LAST_S", 0.05)
    delivered = threading.Event()

    def commit(body: dict[str, Any]) -> httpx.Response:
        if "w2" in body["work_items"]:
            delivered.set()
        return accept(body)

    shift = Shift(leases=100, uploads=slot, partials=take, trajectories=commit)
    shift.engine = engine = Holding(3, deaf=True)
    life = asyncio.create_task(shift.run())
    await until(engine.holds)
    await until(delivered)
    life.cancel()
    threading.Timer(0.5, engine.let_go.set).start()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert shift.wire.of("partials") == []
    assert sorted(shift.ledger.unfinished()) == ["w3", "w4", "w5", "w6"], "they are handed back in `leave`"
    assert shift.ledger.tokens_generated == written(handed_away(shift))


async def test_after_refused_files_nothing_is_handed_over() -> None:
    engine = Holding(MAX_FAULTS + 1)

    class Patient(Echo):
        def reward(self, prompt: Prompt, completion_text: str) -> float:
            # The last fault comes while a batch is in the engine.
            assert prompt.index < 15 or engine.holds.wait(20)
            return 1.0

    shift = Shift(leases=100, uploads=slot, partials=take, trajectories=lambda _: problem("trajectory_refused", 422))
    shift.engine, shift.task = engine, Patient()
    threading.Timer(5.0, engine.let_go.set).start()
    with pytest.raises(WorkerFault, match="refused"):
        await shift.run()
    assert shift.wire.of("partials") == []
    assert set(shift.ledger.tokens_wasted) == {"refused"}
    assert shift.ledger.tokens_generated == shift.ledger.tokens_wasted["refused"]


async def test_a_node_that_can_not_score_leaves_its_samples_to_others() -> None:
    engine = Holding(MAX_FAULTS + 1)

    class NoJudge(Echo):
        def reward(self, prompt: Prompt, completion_text: str) -> float:
            # The last fault comes while a batch is in the engine.
            assert prompt.index < 15 or engine.holds.wait(20)
            raise ValueError("no judge here")

    shift = Shift(leases=100, uploads=slot, partials=take)
    shift.engine, shift.task = engine, NoJudge()
    with pytest.raises(WorkerFault, match="unscored_batch"):
        await shift.run()
    begun = files_of(shift, "partials")
    assert begun == [f"w{n}" for n in range(31, 63)]
    lost = shift.ledger.tokens_wasted["task_error"]
    assert shift.ledger.tokens_generated == lost + written(handed_away(shift))


async def test_whole_groups_that_wait_when_the_engine_fails_still_go_in() -> None:
    heard = asyncio.Event()
    shift = Shift(leases=100, failures=[], uploads=slot, partials=take)
    good = ScriptedEngine.generate

    class Failing(ScriptedEngine):
        def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
            if len(self.batches) >= 2:
                raise RuntimeError("out of memory")
            return good(self, requests)

    def commit(body: dict[str, Any]) -> httpx.Response:
        # Once away, then there: meanwhile the engine has failed.
        if heard.is_set():
            return accept(body)
        heard.set()
        return httpx.Response(503)

    shift.engine = Failing()
    shift.wire._answers["trajectories"] = commit
    with pytest.raises(WorkerFault, match="out of memory"):
        await shift.run()
    assert {row.work_item for row in handed_away(shift)} == {"w0", "w1", "w2"}
    assert not shift.ledger.tokens_wasted


async def test_only_the_engine_s_own_time_can_make_it_hang() -> None:
    """A node whose engine hangs leaves as unfit: a slow environment, or a large version, must not look like one."""
    begun, begin, asked, answer, held, go = (threading.Event() for _ in range(6))

    class Slow(Count):
        def train(self, index: int) -> Prompt:
            begun.set()
            assert begin.wait(20)
            return super().train(index)

        def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
            asked.set()
            assert answer.wait(20)
            return super().respond(prompt, turns)

    class Holds(Turns):
        def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
            if requests[0].start:
                held.set()
                assert go.wait(20)
            return super().generate(requests)

    shift = Shift(leases=1, max_tokens=40, uploads=slot)
    shift.engine, shift.task = Holds(), Slow(2)

    def stalled_after(seconds: float) -> float:
        assert shift._worker is not None
        shift.clock.now += seconds
        return shift._worker.stalled_s

    life = asyncio.create_task(shift.run())
    try:
        for reached, go_on in ((begun, begin), (asked, answer)):
            await until(reached)
            assert stalled_after(worker.STEP_S) == 0.0
            assert stalled_after(1.0) == worker.STEP_S + 1.0, "but not for ever"
            go_on.set()
        await until(held)
        assert stalled_after(7.0) == 7.0
    finally:
        for event in (begin, answer, go):
            event.set()
        await life
    assert stalled_after(worker.STEP_S + 1.0) == 0.0
    assert files_of(shift, "trajectories") == ["w0"]
