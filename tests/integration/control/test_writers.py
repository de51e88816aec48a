"""Writers queue: with each other, in other processes, too, and not for the connections of readers."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from app.storage.database import POOL, Database
from tests.integration.control.conftest import BOTH


@BOTH
async def test_writers_that_wait_leave_readers_their_connections(database_url: str) -> None:
    database = Database(database_url)

    async def write() -> None:
        async with database.write() as session:
            await session.execute(text("SELECT 1"))

    async with asyncio.timeout(20):
        async with database.write():
            waiting = [asyncio.create_task(write()) for _ in range(2 * POOL)]
            await asyncio.sleep(0.3)
            async with asyncio.timeout(5), database.read() as session:
                assert await session.scalar(text("SELECT 1")) == 1
        await asyncio.gather(*waiting)
    await database.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_writers_of_two_processes_wait_for_each_other(database_url: str) -> None:
    mine, other = Database(database_url), Database(database_url)
    done = asyncio.Event()

    async def write() -> None:
        async with other.write():
            done.set()

    async with mine.write():
        waiting = asyncio.create_task(write())
        await asyncio.sleep(0.3)
        assert not done.is_set()
    async with asyncio.timeout(10):
        await waiting
    await mine.close()
    await other.close()
