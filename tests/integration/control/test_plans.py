"""What the hot paths ask of the database goes by an index, whatever lies there from before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from app.storage.database import Database
from app.storage.models import SpotPrice, WorkItem
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import World

Asked = list[tuple[str, Sequence[Any]]]


@contextmanager
def listening(db: Database, words: str) -> Iterator[Asked]:
    """The statements that hold these words."""
    asked: Asked = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Sequence[Any], *_: Any) -> None:
        if words in " ".join(statement.split()):
            asked.append((statement, parameters))

    engine = db._engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def plans(db: Database, asked: Asked) -> list[str]:
    """How SQLite goes about them."""
    found = []
    async with db.connection() as connection:
        for statement, parameters in asked:
            rows = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", tuple(parameters))
            found.append(" | ".join(str(row[3]) for row in rows))
    return found


def trained(job_id: str, ordinal: int) -> WorkItem:
    """A group of long ago."""
    return WorkItem(
        id=f"{job_id}-{ordinal}", job_id=job_id, ordinal=ordinal, prompt_index=0, seed=ordinal, status="trained",
        attempts=1, written_by=[],
    )  # fmt: skip


async def test_a_look_for_work_does_not_go_through_the_work_of_the_past(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await learner.beat()
    async with control.svc.core.db.write() as session:
        session.add_all([trained(job_id, 1000 + n) for n in range(500)])
    with listening(control.svc.core.db, "ORDER BY work_items.ordinal") as asked:
        items, _ = await node.work(1)
    assert len(items) == 1
    assert asked
    for plan in await plans(control.svc.core.db, asked):
        assert "(job_id=? AND status=?" in plan
        assert "TEMP B-TREE" not in plan


async def test_prices_that_the_offers_have_overtaken_are_not_read(control: World, provider: FakeProvider) -> None:
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    await control.running(job_id)
    old = control.clock() - 60
    async with control.svc.core.db.write() as session:
        session.add_all(
            SpotPrice(
                provider="marketplace", selector={}, micros_h=1, effective_at=old + n / 10, received_at=old + n / 10
            )
            for n in range(500)
        )
    with listening(control.svc.core.db, "FROM spot_prices") as asked:
        await control.svc.controller.decide(job_id, "tick")
    assert asked
    for plan in await plans(control.svc.core.db, asked):
        assert "(provider=? AND received_at>?)" in plan
    offers = (await control.get("/v1/offers", job_id=job_id))["items"]
    assert all(float(o["price_per_hour"]) > 0.1 for o in offers), "what is older than the offers changes nothing"
