"""`/v1/jobs/{id}/ledger`, `/v1/ledger`: every entry, in pages or as one CSV file. No decisions here.

Invariant: entries are append-only, so a file that is streamed while others are written misses none that were there
when it began, and holds none twice.
"""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import select

from app.api.deps import CallerDep, Services, ServicesDep
from app.api.paging import Cursor, Limit
from app.api.tables import table, text_response, wants_csv, wants_text
from app.protocol.paging import decode, encode
from app.storage.models import LedgerEntry

router = APIRouter(prefix="/v1", tags=["ledger"])

COLUMNS = ("id", "job_id", "lease_id", "provider", "kind", "from", "to", "usd")
BATCH = 1000


@router.get("/jobs/{job_id}/ledger")
async def job_ledger(
    job_id: str, request: Request, who: CallerDep, svc: ServicesDep, limit: Limit = 200, cursor: Cursor = None
) -> Response:
    """The entries of a job, oldest first; as CSV all of them."""
    await svc.jobs.get(job_id)
    return await _answer(request, svc, job_id, limit, decode(cursor) or 0)


@router.get("/ledger")
async def whole_ledger(
    request: Request, who: CallerDep, svc: ServicesDep, limit: Limit = 200, cursor: Cursor = None
) -> Response:
    """The entries of all jobs, oldest first; as CSV all of them."""
    return await _answer(request, svc, None, limit, decode(cursor) or 0)


async def _answer(request: Request, svc: Services, job_id: str | None, limit: int, after: int) -> Response:
    if wants_csv(request):
        name = f"ledger-{job_id}.csv" if job_id else "ledger.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Vary": "Accept"}
        return StreamingResponse(_csv(svc, job_id, after), media_type="text/csv", headers=headers)
    rows = await _rows(svc, job_id, after, limit + 1)
    views = [svc.views.entry(row) for row in rows[:limit]]
    more = encode(rows[limit - 1].id) if len(rows) > limit else None
    if wants_text(request, "text, json or csv"):
        return text_response(table(views, COLUMNS), more)
    return JSONResponse({"items": views, "next_cursor": more})


async def _rows(svc: Services, job_id: str | None, after: int, limit: int) -> list[LedgerEntry]:
    query = select(LedgerEntry).where(LedgerEntry.id > after).order_by(LedgerEntry.id).limit(limit)
    if job_id is not None:
        query = query.where(LedgerEntry.job_id == job_id)
    async with svc.core.db.read() as session:
        return list(await session.scalars(query))


async def _csv(svc: Services, job_id: str | None, after: int) -> AsyncIterator[str]:
    """RFC 4180, in pieces of BATCH entries."""
    yield _lines([dict(zip(COLUMNS, COLUMNS, strict=True))])
    while rows := await _rows(svc, job_id, after, BATCH):
        after = rows[-1].id
        yield _lines([svc.views.entry(row) for row in rows])


def _lines(views: list[Mapping[str, Any]] | list[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    for view in views:
        writer.writerow([view[column] for column in COLUMNS])
    return out.getvalue()
