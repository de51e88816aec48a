"""An engine and how it is run: in a thread of its own, or in the agent's event loop.

Invariant: installing, loading again and reviving never overlap; an engine that has lost its version gets the one back
that was in force last, from a snapshot that is kept for that, or the node ends. A version that was refused is not tried
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from app.protocol.errors import EchoError, IntegrityError, Unavailable
from app.protocol.node import Weights
from app.rollout_agent.engines.base import Engine, StreamEngine, Tainted
from app.rollout_agent.installing import NotTaken, put_in_force, put_in_force_live
from app.rollout_agent.steps import Steps
from app.snapshots.store import Snapshot

log = logging.getLogger(__name__)

CLOSE_S = 8.0

Pin = Callable[[int], AbstractContextManager[None]]
"""Within its context a version is not removed from the disk."""


class Host(Protocol):
    """What a node does with its engine, whichever kind it is."""

    async def load(self) -> None:
        """`load` of the engine, from the node's model folder."""
        ...

    async def install(self, snapshot: Snapshot) -> EchoError | None:
        """Put a version in force, as `put_in_force`. The caller keeps the snapshot on the disk meanwhile.

        Raises IntegrityError for a version that was refused before.
        """
        ...

    def interrupt(self) -> None:
        """The node ends: nothing more is sampled."""
        ...

    async def close(self) -> None:
        """Free what the engine holds. Raises TimeoutError."""
        ...


class _Keeping:
    """What hosts share: the version in force, which `pin`, once given, keeps on the disk, and the one refused last."""

    def __init__(self) -> None:
        self.pin: Pin = lambda _: contextlib.nullcontext()
        self._in_force: Snapshot | None = None
        self._pins = contextlib.ExitStack()
        self._refused: int | None = None

    @contextlib.contextmanager
    def _taking(self, snapshot: Snapshot) -> Iterator[Snapshot | None]:
        """Around the installation of a version: what was in force before. Raises IntegrityError if it was refused."""
        if snapshot.version == self._refused:
            raise IntegrityError(f"version {snapshot.version} was refused before and is not tried again")
        try:
            yield self._in_force
        except NotTaken:
            self._refused = snapshot.version
            raise
        kept = contextlib.ExitStack()
        kept.enter_context(self.pin(snapshot.version))
        self._pins.close()
        self._pins, self._in_force = kept, snapshot


class BatchHost(_Keeping):
    """An engine that is called from one thread, which is that of `pool`."""

    def __init__(self, engine: Engine, model: Path, pool: Executor) -> None:
        super().__init__()
        self._engine = engine
        self._model = model
        self._pool = pool

    @property
    def weights(self) -> None:
        """Nothing: such an engine reads its weights back itself, and holds them against the signed hash."""

    async def load(self) -> None:
        """See Host."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.load, self._model)

    async def install(self, snapshot: Snapshot) -> Tainted | None:
        """Between two batches."""
        loop = asyncio.get_running_loop()
        with self._taking(snapshot) as before:
            return await loop.run_in_executor(self._pool, put_in_force, self._engine, self._model, snapshot, before)

    def interrupt(self) -> None:
        """See Host."""
        self._engine.interrupt()

    async def close(self) -> None:
        """In the engine's thread, which is free within one token of `interrupt`."""
        self._pins.close()
        async with asyncio.timeout(CLOSE_S):
            await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.close)


class StreamHost(_Keeping):
    """An engine that samples all the time."""

    def __init__(self, engine: StreamEngine, model: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._engine = engine
        self._steps = Steps(engine, clock)
        self._model = model
        self._swapping = asyncio.Lock()
        self._renewals = 0
        """How often the engine was loaded or took a version: each time it has just shown that it works."""

    @property
    def weights(self) -> Weights | None:
        """What the engine says of the weights in force."""
        return self._engine.weights

    @property
    def swapping(self) -> bool:
        """Whether the engine is being loaded or takes a version, and within the time that it may take for that."""
        return self._steps.under_way

    async def load(self) -> None:
        """See Host."""
        async with self._swapping:
            await self._steps.load(self._model)
            self._renewals += 1

    async def install(self, snapshot: Snapshot) -> EchoError | None:
        """While samples run."""
        async with self._swapping:
            try:
                with self._taking(snapshot) as before:
                    mended = await put_in_force_live(self._steps, self._model, snapshot, before)
            except NotTaken:
                self._renewals += 1
                raise
            self._renewals += 1
            return mended

    async def revive(self) -> bool:
        """Give an engine without a version the last one back; False if it has one meanwhile.

        Raises Unavailable before the first version, and what `load` and `install` raise: it can't be done.
        """
        async with self._swapping:
            if self._engine.version is not None:
                return False
            await self._load_anew()
            return True

    async def restart(self) -> None:
        """Load an engine that hangs again, whatever it says of itself. Raises as `revive`.

        Not if it was loaded, or took a version, while this waited for its turn: then it does not hang any more.
        """
        seen = self._renewals
        async with self._swapping:
            if self._renewals != seen:
                log.info("the engine is not restarted: it was renewed meanwhile")
                return
            await self._load_anew()

    async def _load_anew(self) -> None:
        snapshot = self._in_force
        if snapshot is None:
            raise Unavailable("the engine has no version, and none was in force before")
        log.warning("the engine is loaded again, with version %d", snapshot.version)
        await self._steps.load(self._model)
        await self._steps.install(snapshot.payload_path, snapshot.manifest, snapshot.version)
        self._renewals += 1

    def interrupt(self) -> None:
        """Nothing: its samples are tasks of the node, which are cancelled."""

    async def close(self) -> None:
        """See Host."""
        self._pins.close()
        async with asyncio.timeout(CLOSE_S):
            await self._engine.close()
