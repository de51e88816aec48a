"""One control service per database: two would both rent."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from app.main import build_services, create_app
from app.protocol.errors import Unavailable
from app.settings import Settings
from app.storage.database import Database
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider

HOLDER = """
import asyncio, sys
from app.storage.database import Database

async def hold():
    database = Database(sys.argv[1])
    await database.claim()
    print("held", flush=True)
    await asyncio.sleep(60)

asyncio.run(hold())
"""


@BOTH
async def test_a_second_service_waits_for_the_first_one_to_end(database_url: str) -> None:
    first, second = Database(database_url), Database(database_url)
    await first.claim()
    with pytest.raises(Unavailable, match="two would both rent"):
        await second.claim(patience_s=0.3)
    waiting = asyncio.create_task(second.claim(patience_s=10))
    await asyncio.sleep(0)
    await first.close()
    await waiting
    with pytest.raises(Unavailable):
        await first.claim(patience_s=0.1)
    await first.close()
    await second.close()


@BOTH
async def test_one_that_was_killed_holds_nothing(database_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, database_url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"held\n"
        mine = Database(database_url)
        with pytest.raises(Unavailable):
            await mine.claim(patience_s=0.1)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await mine.claim(patience_s=10)
    await mine.close()


async def test_a_service_that_comes_second_rents_nothing(
    tmp_path: Path, database_url: str, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.storage.database.Database.claim.__defaults__", (0.2,))
    settings = Settings(state_dir=tmp_path, database_url=database_url, admin_key="ek_admin")
    holder = Database(database_url)
    await holder.claim()
    svc = build_services(settings, providers={provider.name: provider})
    app = create_app(settings, services=svc)
    with pytest.raises(Unavailable):
        async with app.router.lifespan_context(app):
            pass
    assert provider.listings == 0, "it did not even look"
    await svc.core.db.close()
    await holder.close()
