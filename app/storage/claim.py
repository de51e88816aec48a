"""One control service per database: two would both rent.

Invariant: whoever holds a claim is the only one; the operating system, or the database, takes it back from a process
that is gone, however it ended. PostgreSQL takes it back with the connection, too: so whoever acts looks first whether
it still has it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from sqlalchemy import make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.protocol.errors import Unavailable

log = logging.getLogger(__name__)

SERVICE_LOCK = 0x6563686F33
"""PostgreSQL advisory lock of the control service."""
PATIENCE_S = 15.0
"""A service that is just being stopped gives back what it has within this."""
AGAIN_S = 0.25
ANSWER_S = 5.0
"""So long the database is waited for when the claim is looked at: a connection that was cut silently never answers."""

TAKEN = "another control service uses this database: end it first, for two would both rent"


class Claim:
    """Held from `take` to `release`, or to the end of the process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._held = AsyncExitStack()
        self._wanted = False
        self._connection: AsyncConnection | None = None
        """PostgreSQL only: the lock is this connection's."""
        self._looking = asyncio.Lock()
        """Two that take it again at a time would keep it from each other."""

    async def take(self, patience_s: float = PATIENCE_S) -> None:
        """Raises Unavailable when another process has it for all of `patience_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        attempt = await self._way()
        while not await attempt():
            if loop.time() >= until:
                await self.release()
                raise Unavailable(TAKEN)
            await asyncio.sleep(AGAIN_S)
        self._wanted = True

    async def keep(self) -> None:
        """Look whether what was taken is still held; take it again if not. Raises Unavailable when that can't be, and
        then nothing may be done that needs it. Says nothing where nothing was taken."""
        if not self._wanted or self._engine.dialect.name == "sqlite":
            return  # the file's lock lasts as long as the process
        async with self._looking:
            if self._connection is not None:
                wrong = await self._look(self._connection)
                if not wrong:
                    return
                log.warning("the connection that held the claim on the database is gone: %s", wrong)
                await _end(self._connection)
                self._connection = None
            await self._again()

    async def release(self) -> None:
        """Let the next one have it. A database that is gone has done so already."""
        self._wanted = False
        await self._held.aclose()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await _unlock(connection)  # at once: the server may take a while to see that a connection ended
            await _end(connection)

    async def _way(self) -> Callable[[], Awaitable[bool]]:
        if self._engine.dialect.name == "sqlite":
            return self._by_file(make_url(str(self._engine.url)).database or "")
        connection = self._connection = await self._engine.connect()
        return lambda: _lock(connection)

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

    async def _again(self) -> None:
        connection: AsyncConnection | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await self._engine.connect()
                got = await _lock(connection)
            if got:
                # Not before: a round that is cancelled in between must not leave a connection that only looks right.
                self._connection, connection = connection, None
        except (SQLAlchemyError, OSError) as error:
            raise Unavailable(f"the claim on the database can't be taken again: {_words(error)}") from error
        finally:
            if connection is not None:
                await _end(connection)
        if not got:
            raise Unavailable(TAKEN)
        log.warning("the claim on the database was lost, and is taken again")

    @staticmethod
    async def _look(connection: AsyncConnection) -> str:
        """What is wrong with the connection; empty if it answers."""
        if connection.invalidated:  # a call on it was cancelled: the next one would connect anew, without the lock
            return "it was given up"
        try:
            async with asyncio.timeout(ANSWER_S):
                await connection.execute(text("SELECT 1"))
                await connection.commit()
        except (SQLAlchemyError, OSError) as error:
            return _words(error)
        return ""


async def _end(connection: AsyncConnection) -> None:
    """End the connection itself, and any lock with it: back in the pool it might keep the lock."""
    with suppress(SQLAlchemyError, OSError):
        await connection.invalidate()
    with suppress(SQLAlchemyError, OSError):
        await connection.close()


async def _unlock(connection: AsyncConnection) -> None:
    try:
        async with asyncio.timeout(ANSWER_S):
            await connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": SERVICE_LOCK})
            await connection.commit()
    except (SQLAlchemyError, OSError) as error:
        log.warning("the claim on the database ends with its connection: %s", _words(error))


async def _lock(connection: AsyncConnection) -> bool:
    got = await connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": SERVICE_LOCK})
    # The lock is the session's; a transaction that stays open would keep old rows alive.
    await connection.commit()
    return bool(got)


def _words(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
