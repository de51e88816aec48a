"""One control service per database: two would both rent."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from app.main import build_services, create_app
from app.protocol.errors import Unavailable
from app.settings import Settings
from app.storage import claim
from app.storage.database import Database
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import World

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


CUT = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_locks
WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
POSTGRESQL = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


async def cut(database_url: str) -> None:
    """End the connection that holds the claim, as a restart of the server or a firewall does."""
    other = Database(database_url)
    async with other.connection() as connection:
        assert (await connection.scalars(text(CUT))).all() == [True]
    await other.close()


@POSTGRESQL
async def test_a_claim_whose_connection_was_cut_is_taken_again(database_url: str) -> None:
    mine, other = Database(database_url), Database(database_url)
    await mine.claim()
    await mine.keep_claim()
    await cut(database_url)
    await mine.keep_claim()
    with pytest.raises(Unavailable, match="two would both rent"):
        await other.claim(patience_s=0.1)
    await mine.close()
    await other.claim(patience_s=0.1)
    await other.close()


@POSTGRESQL
async def test_a_claim_that_another_service_took_meanwhile_is_missed_until_that_one_ends(database_url: str) -> None:
    mine, other = Database(database_url), Database(database_url)
    await mine.claim()
    await cut(database_url)
    await other.claim(patience_s=1)
    for _ in range(2):
        with pytest.raises(Unavailable, match="two would both rent"):
            await mine.keep_claim()
    await other.keep_claim()
    await other.close()
    await mine.keep_claim()
    with pytest.raises(Unavailable):
        await other.claim(patience_s=0.1)
    await other.close()
    await mine.close()


@POSTGRESQL
async def test_a_connection_that_does_not_answer_holds_no_claim(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = Database(database_url), Database(database_url)
    await mine.claim()
    monkeypatch.setattr(claim, "ANSWER_S", 0.0)
    with pytest.raises(Unavailable, match="can't be taken again"):
        await mine.keep_claim()
    await other.claim(patience_s=5)
    await other.close()
    await mine.close()


@POSTGRESQL
async def test_a_look_that_was_cancelled_is_not_taken_for_a_claim(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> bool:
        await asyncio.sleep(60)
        return True

    mine, other = Database(database_url), Database(database_url)
    await mine.claim()
    await cut(database_url)
    with monkeypatch.context() as patch:
        patch.setattr(claim, "_lock", hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await mine.keep_claim()
    await other.claim(patience_s=1)
    with pytest.raises(Unavailable):
        await mine.keep_claim()
    await other.close()
    await mine.close()


@POSTGRESQL
async def test_a_claim_whose_connection_is_dead_is_given_back_in_silence(database_url: str) -> None:
    mine, other = Database(database_url), Database(database_url)
    await mine.claim()
    await cut(database_url)
    await mine.close()
    await other.claim(patience_s=0.1)
    await other.close()


@BOTH
async def test_who_claimed_nothing_has_nothing_to_keep(database_url: str) -> None:
    holder, reader = Database(database_url), Database(database_url)
    await holder.claim()
    await reader.keep_claim()
    await reader.close()
    await holder.close()


@POSTGRESQL
async def test_a_service_that_lost_its_claim_rents_nothing_and_says_so(
    control: World, provider: FakeProvider, caplog: pytest.LogCaptureFixture
) -> None:
    await control.svc.core.db.claim()
    await control.round()
    await cut(control.database_url)
    other = Database(control.database_url)
    await other.claim(patience_s=1)
    await control.ready_learner(await control.create())
    listings = provider.listings
    caplog.clear()
    await control.round(30)
    await control.svc.loop._releases()
    await control.svc.loop._collect_garbage()
    assert provider.creates.total() == 0
    assert provider.listings == listings
    assert caplog.text.count("nothing is done") == 3
    caplog.clear()
    control.clock.advance(60)
    assert (await control.http.get("/readyz")).status_code == 503
    await other.close()
    await control.round()
    assert provider.creates.total() == 1
    assert (await control.http.get("/readyz")).status_code == 200


@POSTGRESQL
async def test_a_price_that_is_told_to_a_service_that_lost_its_claim_rents_nothing(
    control: World, provider: FakeProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """It decides at once, and not in a round."""
    await control.svc.core.db.claim()
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    await node.leave()
    await cut(control.database_url)
    other = Database(control.database_url)
    await other.claim(patience_s=1)
    before = provider.creates.total()
    await control.svc.controller.decide(job_id, "a spot price")
    await control.svc.controller.leases.drain_tasks()
    assert provider.creates.total() == before
    assert f"nothing is decided for {job_id}: another control service uses this database" in caplog.text
    await other.close()
    await control.svc.controller.decide(job_id, "a spot price")
    await control.svc.controller.leases.drain_tasks()
    assert provider.creates.total() == before + 1


@POSTGRESQL
async def test_two_that_look_at_a_lost_claim_at_a_time_do_not_keep_it_from_each_other(database_url: str) -> None:
    mine, other = Database(database_url), Database(database_url)
    await mine.claim()
    await cut(database_url)
    await asyncio.gather(*(mine.keep_claim() for _ in range(4)))
    with pytest.raises(Unavailable):
        await other.claim(patience_s=0.1)
    await mine.close()
    await other.claim(patience_s=1)
    await other.close()
