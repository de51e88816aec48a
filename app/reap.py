"""`echo2 reap`: composes the reaper of settings, database and providers. No decisions here.

Invariant: nothing is made, neither a database nor a schema: a database that is not there is an error, because to it
every instance would be without a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Connection, inspect, make_url
from sqlalchemy.exc import SQLAlchemyError

from app.api.tables import table
from app.fleet.metrics import Metrics
from app.fleet.reaping import Finding, Reaper
from app.main import marketplace_key
from app.markets import open_providers
from app.protocol.errors import Unavailable
from app.settings import Settings
from app.storage.database import Database
from providers.base import Provider

COLUMNS = ("provider", "instance_id", "lease_id", "state", "action", "why")


def _providers(settings: Settings) -> dict[str, Provider]:
    # The marketplace's key may come of the state folder's secret; where nobody asks for it none is made.
    key = marketplace_key(settings) if "marketplace" in settings.providers else ""
    return open_providers(settings, key, Metrics().provider_request)


def _has_leases(connection: Connection) -> bool:
    return inspect(connection).has_table("leases")


async def _check(db: Database) -> None:
    """Raises Unavailable for a database that holds no Echo2."""
    url = make_url(db.url)
    where = url.render_as_string(hide_password=True)
    if db.sqlite and not await asyncio.to_thread(Path(url.database or "").is_file):
        raise Unavailable(f"there is no database at {where}; nothing is destroyed without one")
    async with db.connection() as connection:
        if not await connection.run_sync(_has_leases):
            raise Unavailable(f"the database at {where} holds no Echo2 tables; nothing is destroyed without them")


async def reap(
    settings: Settings, *, dry_run: bool, providers: Callable[[Settings], dict[str, Provider]] = _providers
) -> list[Finding]:
    """One sweep with these settings. Raises Unavailable when the database can't be used, SettingsError."""
    db = Database(settings.database_url)
    opened: dict[str, Provider] = {}
    try:
        await _check(db)
        opened = providers(settings)
        reaper = Reaper(db, opened, fleet_id=settings.fleet_id, settle_s=settings.settle_seconds, clock=time.time)
        return await reaper.run(dry_run=dry_run)
    except SQLAlchemyError as error:
        raise Unavailable(f"the database can't be used: {type(error).__name__}; nothing more is destroyed") from error
    finally:
        for provider in opened.values():
            await provider.aclose()
        await db.close()


def status(findings: Sequence[Finding]) -> int:
    """Exit status: 1 if something could not be read or destroyed."""
    return 1 if any(f.failed for f in findings) else 0


def text(findings: Sequence[Finding]) -> str:
    """A table for people."""
    rows = [{column: getattr(f, column) for column in COLUMNS} for f in findings]
    return table(rows, COLUMNS) if rows else "no instance carries this fleet's label"
