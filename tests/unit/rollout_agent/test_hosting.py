"""A version in force in an engine that samples all the time, and one that has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.protocol.errors import IntegrityError, Unavailable
from app.rollout_agent.engines.base import EngineDied, Tainted
from app.rollout_agent.engines.registry import is_stream
from app.rollout_agent.hosting import StreamHost
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.rollout_agent.working import revived
from app.snapshots.store import Snapshot
from tests.unit.rollout_agent.fake_stream import FakeStream
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


@pytest.mark.parametrize("taints", [1, 2])
async def test_a_tainted_engine_is_loaded_again_once_and_samples_nothing_meanwhile(taints: int) -> None:
    engine = FakeStream()
    host, pins = hosted(engine)
    await host.install(snapshot(3))
    running = asyncio.create_task(engine.sample([1], seed=0, max_tokens=4, temperature=1.0))
    await asyncio.sleep(0)
    engine.taints = taints
    if taints == 2:
        with pytest.raises(Tainted):
            await host.install(snapshot(4))
        assert engine.version is None
        with pytest.raises(Unavailable):
            await engine.sample([1], seed=0, max_tokens=4, temperature=1.0)
        assert pins.kept == [3]
    else:
        mended = await host.install(snapshot(4))
        assert isinstance(mended, Tainted)
        assert engine.version == 4
        assert pins.kept == [4]
    assert engine.loads == 1
    with pytest.raises(EngineDied):
        await running


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
