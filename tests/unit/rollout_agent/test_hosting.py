"""A version in force in an engine that samples all the time, and one that has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.protocol.errors import IntegrityError, Unavailable
from app.rollout_agent.engines.base import EngineDied, Tainted
from app.rollout_agent.engines.registry import is_stream
from app.rollout_agent.hosting import BatchHost, StreamHost
from app.rollout_agent.installing import NotTaken
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.rollout_agent.working import revived
from app.snapshots.store import Snapshot
from tests.unit.rollout_agent.fake_stream import FakeStream, Mortal
from tests.unit.rollout_agent.fakes import ScriptedEngine


def snapshot(version: int) -> Snapshot:
    return cast(Snapshot, SimpleNamespace(version=version, payload_path=Path("payload"), manifest=None))


class Pins:
    """Versions that are kept on the disk."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    @contextlib.contextmanager
    def __call__(self, version: int) -> Iterator[None]:
        self.kept.append(version)
        yield
        self.kept.remove(version)


def hosted(engine: FakeStream) -> tuple[StreamHost, Pins]:
    engine.version = None
    host, pins = StreamHost(engine, Path("model")), Pins()
    host.pin = pins
    return host, pins


class Counting:
    """Counts what died."""

    def __init__(self) -> None:
        self.ledger = WorkLedger(lambda: 0.0)

    async def died(self) -> None:
        self.ledger.fault("engine_died", "it died")


async def test_the_version_in_force_stays_on_the_disk() -> None:
    host, pins = hosted(FakeStream())
    for version in (3, 4):
        assert await host.install(snapshot(version)) is None
        assert pins.kept == [version]
    await host.close()
    assert pins.kept == []


@pytest.mark.parametrize(("taints", "left"), [(1, 4), (2, 3), (3, None)])
async def test_a_tainted_engine_is_loaded_again_and_a_version_that_fails_twice_gives_way_to_the_last(
    taints: int, left: int | None
) -> None:
    engine = FakeStream()
    host, pins = hosted(engine)
    await host.install(snapshot(3))
    running = asyncio.create_task(engine.sample([1], seed=0, max_tokens=4, temperature=1.0))
    await asyncio.sleep(0)
    engine.taints = taints
    if left == 4:
        assert isinstance(await host.install(snapshot(4)), Tainted)
    elif left == 3:
        with pytest.raises(NotTaken, match="half of it is there; version 3 is in force again"):
            await host.install(snapshot(4))
    else:
        with pytest.raises(Tainted, match="half of it is there; nor could version 3 be put in force again: half"):
            await host.install(snapshot(4))
        with pytest.raises(Unavailable):
            await engine.sample([1], seed=0, max_tokens=4, temperature=1.0)
    assert engine.version == left
    assert pins.kept == [left or 3]
    assert engine.loads == min(taints, 2)
    with pytest.raises(EngineDied):
        await running


async def test_the_first_version_has_none_to_go_back_to() -> None:
    engine = FakeStream()
    host, pins = hosted(engine)
    engine.taints = 2
    with pytest.raises(Tainted, match="half of it is there"):
        await host.install(snapshot(3))
    assert (engine.version, engine.loads, pins.kept) == (None, 1, [])


async def test_a_refused_version_is_not_tried_again_and_a_newer_one_is() -> None:
    engine = FakeStream()
    host, pins = hosted(engine)
    await host.install(snapshot(3))
    engine.taints = 2
    with pytest.raises(NotTaken):
        await host.install(snapshot(4))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="version 4 was refused before"):
            await host.install(snapshot(4))
    assert (engine.version, engine.loads) == (3, 2)
    assert await host.install(snapshot(5)) is None
    assert (engine.version, engine.loads, pins.kept) == (5, 2, [5])


async def test_an_engine_that_does_not_come_up_for_the_second_try_gets_the_last_version() -> None:
    class Sluggish(FakeStream):
        async def load(self, model_dir: Path) -> None:
            await super().load(model_dir)
            if self.loads == 1:
                raise Unavailable("the engine did not come up in 900 s")

    engine = Sluggish()
    host, _ = hosted(engine)
    await host.install(snapshot(3))
    engine.taints = 1
    with pytest.raises(NotTaken, match="did not come up in 900 s; version 3"):
        await host.install(snapshot(4))
    assert (engine.version, engine.loads) == (3, 2)


async def test_an_engine_in_a_thread_goes_back_to_the_last_version_too() -> None:
    class Picky(ScriptedEngine):
        loads = 0

        def load(self, model_dir: Path) -> None:
            self.loads += 1

        def install(self, payload: Path, manifest: Any, version: int) -> None:
            self.version = None
            if version == 4:
                raise Tainted("half of it is there")
            self.version = version

    engine, pins = Picky(), Pins()
    with ThreadPoolExecutor(1) as pool:
        host = BatchHost(engine, Path("model"), pool)
        host.pin = pins
        await host.install(snapshot(3))
        with pytest.raises(NotTaken, match="version 3 is in force again"):
            await host.install(snapshot(4))
        with pytest.raises(IntegrityError, match="refused before"):
            await host.install(snapshot(4))
        assert (engine.version, engine.loads, pins.kept) == (3, 2, [3])
        await host.close()
    assert pins.kept == []


async def test_what_does_not_fit_leaves_the_old_version_in_force() -> None:
    class Picky(FakeStream):
        async def install(self, payload: Path, manifest: Any, version: int) -> None:
            if version == 4:
                raise IntegrityError("it is of another model")
            await super().install(payload, manifest, version)

    engine = Picky()
    host, pins = hosted(engine)
    await host.install(snapshot(3))
    with pytest.raises(IntegrityError, match="another model"):
        await host.install(snapshot(4))
    assert (engine.version, engine.loads, pins.kept) == (3, 0, [3])


async def test_a_dead_engine_gets_its_last_version_back_once_for_all_who_ask() -> None:
    engine = FakeStream()
    host, _ = hosted(engine)
    await host.install(snapshot(5))
    engine.die()
    assert sorted(await asyncio.gather(*(host.revive() for _ in range(5)))) == [False] * 4 + [True]
    assert (engine.version, engine.loads) == (5, 1)


async def test_a_revival_waits_for_a_running_installation() -> None:
    release = asyncio.Event()

    class Slow(FakeStream):
        async def install(self, payload: Path, manifest: Any, version: int) -> None:
            self.version = None
            await release.wait()
            await super().install(payload, manifest, version)

    engine = Slow()
    host, _ = hosted(engine)
    installing = asyncio.create_task(host.install(snapshot(6)))
    await asyncio.sleep(0)
    reviving = asyncio.create_task(host.revive())
    await asyncio.sleep(0)
    release.set()
    await installing
    assert not await reviving
    assert (engine.version, engine.loads) == (6, 0)


@pytest.mark.parametrize("first", [True, False])
async def test_an_engine_that_is_found_dead_by_a_version_is_loaded_again_for_it(first: bool) -> None:
    engine = Mortal()
    host, pins = hosted(engine)
    if not first:
        await host.install(snapshot(5))
    engine.die()
    mended = await host.install(snapshot(6))
    assert mended is not None
    assert "does not run" in mended.detail
    assert (engine.version, engine.loads, pins.kept) == (6, 1, [6])


async def test_a_dead_engine_that_then_does_not_take_the_version_gets_the_last_one() -> None:
    engine = Mortal(misfit=6)
    host, pins = hosted(engine)
    await host.install(snapshot(5))
    engine.die()
    with pytest.raises(NotTaken, match="another model; version 5 is in force again"):
        await host.install(snapshot(6))
    assert (engine.version, engine.loads, pins.kept) == (5, 2, [5])


async def test_an_engine_that_stays_dead_is_not_loaded_for_ever() -> None:
    engine = Mortal()
    host, _ = hosted(engine)
    await host.install(snapshot(5))
    engine.die()
    tries = 0

    async def load(model_dir: Path) -> None:
        nonlocal tries
        tries += 1
        raise Unavailable("no engine here")

    engine.load = load  # type: ignore[method-assign]
    with pytest.raises(Tainted, match="no engine here; nor could version 5 be put in force again: no engine"):
        await host.install(snapshot(6))
    assert (engine.version, tries) == (None, 2)


async def test_a_first_version_that_does_not_fit_is_no_reason_to_load_again() -> None:
    engine = Mortal(misfit=5)
    host, _ = hosted(engine)
    with pytest.raises(IntegrityError, match="another model"):
        await host.install(snapshot(5))
    assert engine.loads == 0


async def test_an_engine_is_swapping_while_a_step_takes_no_longer_than_it_may() -> None:
    now = 0.0
    seen: list[bool] = []

    class Slow(FakeStream):
        async def load(self, model_dir: Path) -> None:
            await self._take()
            await super().load(model_dir)

        async def install(self, payload: Path, manifest: Any, version: int) -> None:
            await self._take()
            await super().install(payload, manifest, version)

        async def _take(self) -> None:
            nonlocal now
            for seconds in (0.0, self.patience_s, 1.0):
                now += seconds
                seen.append(host.swapping)

    engine = Slow()
    engine.version = None
    host = StreamHost(engine, Path("model"), lambda: now)
    assert not host.swapping
    await host.install(snapshot(5))
    assert not host.swapping
    assert seen == [True, True, False]
    engine.taints = 1
    await host.install(snapshot(6))
    await host.load()
    await host.restart()
    assert seen == [True, True, False] * 7, "each step has its own time"


class Held(FakeStream):
    """Installs when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.may.set()
        self.misfit: int | None = None

    async def install(self, payload: Path, manifest: Any, version: int) -> None:
        await self.may.wait()
        if version == self.misfit:
            raise IntegrityError("it is of another model")
        await super().install(payload, manifest, version)


@pytest.mark.parametrize("how", ["swapped", "went back", "unchanged"])
async def test_an_engine_that_was_renewed_while_its_restart_waited_is_left_alone(how: str) -> None:
    engine = Held()
    host, _ = hosted(engine)
    await host.install(snapshot(5))
    engine.may.clear()
    engine.taints = 2 if how == "went back" else 0
    engine.misfit = 6 if how == "unchanged" else None
    installing = asyncio.create_task(host.install(snapshot(6)))
    await asyncio.sleep(0)
    restarting = asyncio.create_task(host.restart())
    await asyncio.sleep(0)
    engine.may.set()
    await asyncio.gather(installing, return_exceptions=True)
    await restarting
    expected = {"swapped": (6, 0), "went back": (5, 2), "unchanged": (5, 1)}
    assert (engine.version, engine.loads) == expected[how]
    await host.restart()
    assert engine.loads == expected[how][1] + 1, "one that hangs later is"


async def test_an_engine_that_hangs_is_loaded_again_whatever_it_says() -> None:
    engine = FakeStream()
    host, _ = hosted(engine)
    await host.install(snapshot(5))
    await host.restart()
    assert (engine.version, engine.loads) == (5, 1)


async def test_an_engine_that_can_t_be_loaded_again_or_dies_too_often_is_a_fault_of_the_node() -> None:
    engine, faults = FakeStream(), Counting()
    host, _ = hosted(engine)
    with pytest.raises(WorkerFault, match="none was in force"):
        await revived(host, faults)  # type: ignore[arg-type]
    await host.install(snapshot(5))
    for _ in range(MAX_FAULTS - 1):
        engine.die()
        await revived(host, faults)  # type: ignore[arg-type]
    engine.die()
    with pytest.raises(WorkerFault, match="it died"):
        await revived(host, faults)  # type: ignore[arg-type]
    engine.die()
    engine.stays_dead = True
    with pytest.raises(WorkerFault, match="no engine here"):
        await revived(host, faults)  # type: ignore[arg-type]


def test_engines_are_told_apart() -> None:
    assert is_stream(FakeStream())
    assert not is_stream(ScriptedEngine())
