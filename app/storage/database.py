"""The database: one engine, short transactions, schema by Alembic.

Invariant: a transaction never waits for the network. Writers take one write lock at BEGIN (SQLite would otherwise
find out at COMMIT that somebody else wrote), so a read-modify-write inside `write()` is atomic on SQLite and on
PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine

from app.storage.claim import PATIENCE_S, Claim

MIGRATIONS = Path(__file__).parent / "migrations"
WRITE_LOCK = 0x6563686F32
"""PostgreSQL advisory lock of writers ("echo2"): what BEGIN IMMEDIATE is to SQLite."""

POOL = 16
"""Connections that are kept; ten more for a moment."""


def async_url(url: str) -> str:
    """The URL with its asynchronous driver: `postgresql://` → asyncpg, `sqlite://` → aiosqlite."""
    parsed = make_url(url)
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    return parsed.set(drivername=drivers.get(parsed.drivername, parsed.drivername)).render_as_string(False)


class Database:
    """Sessions over SQLite or PostgreSQL."""

    def __init__(self, url: str) -> None:
        self.url = async_url(url)
        self.sqlite = self.url.startswith("sqlite")
        # A connection to SQLite is a thread and a handful of pragmas: one that long polls share is kept, not made anew.
        options: dict[str, Any] = {"pool_size": POOL} if self.sqlite else {"pool_pre_ping": True, "pool_size": POOL}
        self._engine = create_async_engine(self.url, **options)
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)
        self._claim = Claim(self._engine)
        # One writer at a time: queueing here is fair, does not spin on SQLite's "database is locked", and holds none of
        # the connections that readers need.
        self._writer = asyncio.Lock()
        if self.sqlite:
            event.listen(self._engine.sync_engine, "connect", _sqlite_connect)
            event.listen(self._engine.sync_engine, "begin", _sqlite_begin)

    async def migrate(self) -> None:
        """Bring the schema to the newest revision."""
        async with self._engine.connect() as connection:
            connection = await connection.execution_options(write=True)
            await connection.run_sync(_upgrade)
            await connection.commit()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session that only reads."""
        async with self._sessions() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A session that commits at the end, or rolls back when the block raises."""
        async with self._writer, self._sessions() as session:
            if self.sqlite:
                await session.connection(execution_options={"write": True})
            else:
                # READ COMMITTED alone would let two writers, here and in another process, read the same counter and
                # both act on it.
                await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITE_LOCK})
            yield session
            await session.commit()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """A bare connection, for health checks."""
        async with self._engine.connect() as connection:
            yield connection

    async def claim(self, patience_s: float = PATIENCE_S) -> None:
        """Be the only control service on this database until it is closed. Raises Unavailable."""
        await self._claim.take(patience_s)

    async def keep_claim(self) -> None:
        """Make sure that what was claimed is still held. Raises Unavailable: then nothing may be rented or ended."""
        await self._claim.keep()

    async def close(self) -> None:
        """Return all connections."""
        await self._claim.release()
        await self._engine.dispose()


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
