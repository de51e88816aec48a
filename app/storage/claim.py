"""One control service per database: two would both rent.

Invariant: whoever holds a claim is the only one; the operating system, or the database, takes it back from a process
that is gone, however it ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.protocol.errors import Unavailable

SERVICE_LOCK = 0x6563686F33
"""PostgreSQL advisory lock of the control service."""
PATIENCE_S = 15.0
"""A service that is just being stopped gives back what it has within this."""
AGAIN_S = 0.25


class Claim:
    """Held from `take` to `release`, or to the end of the process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._held = AsyncExitStack()

    async def take(self, patience_s: float = PATIENCE_S) -> None:
        """Raises Unavailable when another process has it for all of `patience_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        attempt = await self._way()
        while not await attempt():
            if loop.time() >= until:
                await self.release()
                raise Unavailable("another control service uses this database: end it first, for two would both rent")
            await asyncio.sleep(AGAIN_S)

    async def release(self) -> None:
        """Let the next one have it."""
        await self._held.aclose()

    async def _way(self) -> Callable[[], Awaitable[bool]]:
        if self._engine.dialect.name == "sqlite":
            return self._by_file(make_url(str(self._engine.url)).database or "")
        return self._by_database(await self._held.enter_async_context(self._engine.connect()))

    def _by_file(self, database: str) -> Callable[[], Awaitable[bool]]:
        in_memory = database in ("", ":memory:")
        # Not inherited by learners and marketplaces, that may live longer.
        handle = None if in_memory else os.open(Path(database + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        if handle is not None:
            self._held.callback(os.close, handle)

        async def attempt() -> bool:
            if handle is None:
                return True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        return attempt

    def _by_database(self, connection: AsyncConnection) -> Callable[[], Awaitable[bool]]:
        async def attempt() -> bool:
            got = await connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": SERVICE_LOCK})
            # The lock is the session's; a transaction that stays open would keep old rows alive.
            await connection.commit()
            return bool(got)

        async def unlock() -> None:
            # The connection goes back to a pool, and the lock would go with it.
            await connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": SERVICE_LOCK})
            await connection.commit()

        self._held.push_async_callback(unlock)
        return attempt
