"""Generation that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.rollout_agent.faults import Faults
from app.rollout_agent.hosting import StreamHost
from app.rollout_agent.measure import Rates
from app.rollout_agent.stalls import LEAST_SILENT_S, LOOK_S, Hung, StallWatch, hangs, judge, silent
from app.rollout_agent.watching import watch_of
from tests.unit.rollout_agent.fake_stream import GROUP, Desk, FakeStream, Shift


@pytest.mark.parametrize(
    ("stalled", "usual", "hung"),
    [(0, None, False), (60, None, False), (61, None, True), (61, 2.0, True), (61, 30.0, False), (301, 30.0, True)],
)
def test_the_bound_follows_what_is_usual(stalled: float, usual: float | None, hung: bool) -> None:
    assert hangs(stalled, usual) is hung


@pytest.mark.parametrize(
    ("quiet", "between", "asked"),
    [(600, None, False), (30, 0.1, False), (31, 0.1, True), (31, 2.0, False), (40, 2.0, False), (41, 2.0, True)],
)
def test_an_engine_is_asked_early_by_what_was_measured(quiet: float, between: float | None, asked: bool) -> None:
    assert silent(quiet, between) is asked


def test_what_to_do() -> None:
    assert judge(1000.0, [], healthy=True) == "wait"
    assert judge(1000.0, [], healthy=False) == "restart"
    assert judge(1000.0, [900.0], healthy=False) == "leave"
    assert judge(9000.0, [900.0], healthy=False) == "restart", "longer than an hour ago"
    assert judge(90_000.0, [900.0, 87_000.0], healthy=False) == "leave", "however long the machine has been up"
    assert judge(1000.0, [], healthy=None) == "leave", "what can't be restarted can't go on"


class Machine:
    """An engine that can hang."""

    def __init__(self, *, can_restart: bool = True, alive: bool = False) -> None:
        self.now = 0.0
        self.hung_since: float | None = None
        self.alive = alive
        self.restarts = 0
        self.reports: list[str] = []
        self.watch = StallWatch(
            stalled_s=lambda: self.now - self.hung_since if self.hung_since is not None else 0.0,
            usual_s=lambda: 1.0,
            healthy=self.healthy if can_restart else None,
            restart=self.restart if can_restart else None,
            report=self.report,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    async def healthy(self, timeout_s: float) -> bool:
        return self.alive

    async def restart(self) -> None:
        self.restarts += 1
        self.hung_since = None

    async def report(self, words: str) -> None:
        self.reports.append(words)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now == 500.0 or self.now == 1000.0:
            self.hung_since = self.now


async def test_an_engine_that_hangs_is_restarted_once_and_then_the_node_leaves() -> None:
    machine = Machine()
    with pytest.raises(Hung, match="nothing was generated for 65 s"):
        await machine.watch.run()
    assert machine.restarts == 1
    assert len(machine.reports) == 2
    assert machine.now == 1065.0


async def test_an_engine_that_can_t_be_restarted_ends_the_node_at_once() -> None:
    machine = Machine(can_restart=False)
    with pytest.raises(Hung):
        await machine.watch.run()
    assert (machine.now, machine.restarts, len(machine.reports)) == (565.0, 0, 1)


async def test_an_engine_that_answers_is_left_alone() -> None:
    machine = Machine(alive=True)
    machine.hung_since = 0.0
    machine.now = 400.0
    await machine.watch.look()
    assert (machine.restarts, machine.reports) == (0, [])


async def test_an_engine_that_is_asked_early_has_to_miss_two_probes_in_a_row_each_time() -> None:
    now, restarts = 0.0, list[float]()
    answers = iter([False, True, False, False, False])

    async def healthy(timeout_s: float) -> bool:
        return next(answers)

    async def restart() -> None:
        restarts.append(now)

    async def report(words: str) -> None:
        """It is told."""

    watch = StallWatch(
        stalled_s=lambda: now, usual_s=lambda: 1000.0, between_s=lambda: 0.1,
        healthy=healthy, restart=restart, report=report, clock=lambda: now,
    )  # fmt: skip
    for at, done in ((40.0, []), (45.0, []), (90.0, []), (95.0, [95.0]), (140.0, [95.0])):
        now = at
        await watch.look()
        assert restarts == done


class Probed(FakeStream):
    """Counts how often it was asked for a token; answers if it is `alive`."""

    def __init__(self) -> None:
        super().__init__(odds=1000)
        self.alive = False
        self.probes = 0

    async def healthy(self, timeout_s: float) -> bool:
        self.probes += 1
        return self.alive

    async def load(self, model_dir: Path) -> None:
        await super().load(model_dir)
        self.die()


class Watched:
    """A continuous worker that has a group in flight and has finished one sample in every second, and its watch."""

    def __init__(self, shift: Shift, engine: Probed, folder: Path) -> None:
        self.shift, self.engine = shift, engine
        self.host = StreamHost(engine, folder, shift.clock)
        self.watch = self.watching()

    def watching(self) -> StallWatch:
        """A watch that has seen nothing yet."""
        shift = self.shift
        return watch_of(
            shift.worker, self.host, self.engine, Faults(shift.desk.wire.client(shift.clock), shift.ledger),
            probe=lambda: Rates(1.0, 2000.0), max_tokens=8192, clock=shift.clock,
        )  # fmt: skip

    async def quiet(self, seconds: float) -> None:
        """Time in which nothing comes out of the engine, and the watch looks."""
        until = self.shift.clock.now + seconds
        while self.shift.clock.now < until:
            self.shift.clock.now += LOOK_S
            await self.watch.look()

    @property
    def hung(self) -> list[dict[str, Any]]:
        """Reports of a stall."""
        return [r for r in self.shift.desk.wire.of("reports") if r["subject"] == "hung"]


@asynccontextmanager
async def watched(folder: Path, *, finished: int) -> AsyncIterator[Watched]:
    """`finished`: samples of the first group that came to their end, one a second."""
    engine = Probed()
    async with Shift(engine, Desk(left=2)) as shift:
        await shift.until(lambda: len(engine.running) == 2 * GROUP, "all is being sampled", steps=False)
        for n in range(finished):
            shift.clock.now += 1.0
            engine.step()
            engine._end(engine.running[0], "length")
            left = 2 * GROUP - n - 1
            await shift.until(lambda left=left: len(engine.running) == left, "it came", steps=False)  # type: ignore[misc]
        case = Watched(shift, engine, folder)
        snapshot: Any = SimpleNamespace(payload_path=None, manifest=None, version=0)
        await case.host.install(snapshot)
        yield case


async def test_a_streaming_engine_that_stands_still_is_soon_asked_and_restarted(tmp_path: Path) -> None:
    async with watched(tmp_path, finished=3) as case:
        await case.quiet(30.0)
        assert case.engine.probes == 0
        await case.quiet(LOOK_S)
        assert (case.engine.probes, case.engine.loads) == (1, 0), "one probe may fail by chance"
        await case.quiet(LOOK_S)
        assert (case.engine.probes, case.engine.loads) == (2, 1)
        assert case.engine.version == 0
        assert len(case.hung) == 1
        again = 2 * GROUP + 2 * GROUP - 3
        await case.shift.until(lambda: case.engine.asked == again, "its samples go on", steps=False)
        await case.quiet(25.0)
        assert case.engine.probes == 2, "asked anew, they have their time"


async def test_a_streaming_engine_that_answers_a_probe_is_left_alone(tmp_path: Path) -> None:
    async with watched(tmp_path, finished=3) as case:
        case.engine.alive = True
        await case.quiet(300.0)
        assert 5 <= case.engine.probes <= 10, "an answer holds for as long as a result"
        assert (case.engine.loads, case.hung) == (0, [])
        assert len(case.engine.running) == 2 * GROUP - 3


async def test_a_streaming_engine_of_which_nothing_was_measured_has_the_time_of_its_longest_samples(
    tmp_path: Path,
) -> None:
    longest = 64 * 8192 / 2000.0
    async with watched(tmp_path, finished=0) as case:
        await case.quiet(10 * longest - LOOK_S)
        assert case.engine.probes == 0
        await case.quiet(LOOK_S)
        assert (case.engine.probes, case.engine.loads) == (1, 1), "a bound that long needs no second probe"


@pytest.mark.parametrize("finished", [0, 3], ids=["judged by its longest samples", "asked early"])
async def test_a_swap_that_takes_long_is_no_engine_that_hangs(tmp_path: Path, finished: int) -> None:
    may = asyncio.Event()
    async with watched(tmp_path, finished=finished) as case:
        take, case.engine.patience_s = case.engine.install, 4000.0

        async def install(payload: Path, manifest: Any, version: int) -> None:
            await may.wait()
            await take(payload, manifest, version)

        case.engine.install = install  # type: ignore[method-assign]
        snapshot: Any = SimpleNamespace(payload_path=None, manifest=None, version=1)
        swap = asyncio.create_task(case.host.install(snapshot))
        await asyncio.sleep(0)
        case.shift.clock.now += 3000.0
        await case.quiet(600.0)
        assert (case.engine.probes, case.hung) == (0, [])
        may.set()
        await swap
        await case.quiet(LEAST_SILENT_S)
        assert case.engine.probes == 0, "what it was to give, it has from now on its time for"
        case.shift.clock.now += 3000.0
        await case.quiet(2 * LOOK_S)
        assert (len(case.hung), case.engine.loads) == (1, 1), "it is asked again afterwards"


async def test_a_probe_that_meets_a_swap_counts_for_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path, finished=3) as case:
        may = asyncio.Event()

        async def healthy(timeout_s: float) -> bool:
            case.engine.probes += 1
            swaps.append(asyncio.create_task(case.host.load()))
            await asyncio.sleep(0)
            return False

        async def load(model_dir: Path) -> None:
            await may.wait()

        swaps: list[asyncio.Task[None]] = []
        case.engine.healthy, case.engine.load = healthy, load  # type: ignore[method-assign]
        case.watch = case.watching()
        case.shift.clock.now += 3000.0
        await case.watch.look()
        may.set()
        await asyncio.gather(*swaps)
        assert (case.engine.probes, case.hung) == (1, [])


async def test_a_swap_that_outlasts_its_own_time_is_asked_after(tmp_path: Path) -> None:
    async with watched(tmp_path, finished=0) as case:

        async def install(payload: Path, manifest: Any, version: int) -> None:
            await asyncio.Event().wait()

        case.engine.install = install  # type: ignore[method-assign]
        snapshot: Any = SimpleNamespace(payload_path=None, manifest=None, version=1)
        swap = asyncio.create_task(case.host.install(snapshot))
        await asyncio.sleep(0)
        await case.quiet(case.engine.patience_s)
        assert case.engine.probes == 0
        case.shift.clock.now += 3000.0
        looking = asyncio.create_task(case.watch.look())
        await case.shift.until(lambda: len(case.hung) == 1, "it is told", steps=False)
        for task in (looking, swap):
            task.cancel()
        await asyncio.gather(looking, swap, return_exceptions=True)
