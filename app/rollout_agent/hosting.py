"""An engine and how it is run: in a thread of its own, or in the agent's event loop.

Invariant: installing, loading again and reviving never overlap; an engine that has lost its version gets the one back
that was in force last, from a snapshot that is kept for that, or the node ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from app.protocol.errors import Unavailable
from app.rollout_agent.engines.base import Engine, StreamEngine, Tainted
from app.rollout_agent.installing import put_in_force, put_in_force_live
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

    async def install(self, snapshot: Snapshot) -> Tainted | None:
        """Put a version in force, as `put_in_force`. The caller keeps the snapshot on the disk meanwhile."""
        ...

    def interrupt(self) -> None:
        """The node ends: nothing more is sampled."""
        ...

    async def close(self) -> None:
        """Free what the engine holds. Raises TimeoutError."""
        ...


class BatchHost:
    """An engine that is called from one thread, which is that of `pool`."""

    def __init__(self, engine: Engine, model: Path, pool: Executor) -> None:
        self._engine = engine
        self._model = model
        self._pool = pool

    async def load(self) -> None:
        """See Host."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.load, self._model)

    async def install(self, snapshot: Snapshot) -> Tainted | None:
        """Between two batches."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, put_in_force, self._engine, self._model, snapshot)

    def interrupt(self) -> None:
        """See Host."""
        self._engine.interrupt()

    async def close(self) -> None:
        """In the engine's thread, which is free within one token of `interrupt`."""
        async with asyncio.timeout(CLOSE_S):
            await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.close)


class StreamHost:
    """An engine that samples all the time. `pin`, once there is one, keeps the version in force on the disk."""

    def __init__(self, engine: StreamEngine, model: Path) -> None:
        self.pin: Pin = lambda _: contextlib.nullcontext()
        self._engine = engine
        self._model = model
        self._swapping = asyncio.Lock()
        self._in_force: Snapshot | None = None
        self._pins = contextlib.ExitStack()

    async def load(self) -> None:
        """See Host."""
        async with self._swapping:
            await self._engine.load(self._model)

    async def install(self, snapshot: Snapshot) -> Tainted | None:
        """While samples run."""
        async with self._swapping:
            mended = await put_in_force_live(self._engine, self._model, snapshot)
            kept = contextlib.ExitStack()
            kept.enter_context(self.pin(snapshot.version))
            self._pins.close()
            self._pins, self._in_force = kept, snapshot
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
        """Load an engine that hangs again, whatever it says of itself. Raises as `revive`."""
        async with self._swapping:
            await self._load_anew()

    async def _load_anew(self) -> None:
        snapshot = self._in_force
        if snapshot is None:
            raise Unavailable("the engine has no version, and none was in force before")
        log.warning("the engine is loaded again, with version %d", snapshot.version)
        await self._engine.load(self._model)
        await self._engine.install(snapshot.payload_path, snapshot.manifest, snapshot.version)

    def interrupt(self) -> None:
        """Nothing: its samples are tasks of the node, which are cancelled."""

    async def close(self) -> None:
        """See Host."""
        self._pins.close()
        async with asyncio.timeout(CLOSE_S):
            await self._engine.close()
