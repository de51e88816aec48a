"""The migrations make the schema that the models expect, on both databases."""

from __future__ import annotations

from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from app.storage.database import Database
from app.storage.models import Base
from tests.integration.control.conftest import BOTH


def _differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, Base.metadata))


@BOTH
async def test_models_and_migrations_agree(database_url: str) -> None:
    database = Database(database_url)
    await database.migrate()
    async with database.connection() as connection:
        assert await connection.run_sync(_differences) == []
    await database.close()
