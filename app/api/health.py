"""`/healthz`, `/readyz`, `/metrics`: no key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from app.api.deps import ServicesDep
from app.protocol.errors import NotFound

router = APIRouter(tags=["health"])
ANSWER_S = 5.0
"""A database that takes longer does not answer: over a network that swallows packets a statement waits for minutes."""


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(svc: ServicesDep) -> Response:
    """The database and the object store answer, and the loop turns; 503 with what does not."""
    trouble = {}
    try:
        async with asyncio.timeout(ANSWER_S), svc.core.db.connection() as connection:
            await connection.execute(text("SELECT 1"))
    except (SQLAlchemyError, OSError) as error:
        trouble["database"] = type(error).__name__
    quiet = svc.core.clock() - max(svc.loop.last_round_at, svc.core.started_at)
    if quiet > max(60.0, 5 * svc.core.settings.tick_seconds):
        trouble["loop"] = f"no round for {quiet:.0f} s"
    away = svc.core.store.away
    if away is not None and away.lasts(svc.core.clock()):
        trouble["object_store"] = away.why
    if trouble:
        return JSONResponse({"status": "unready", "trouble": trouble}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(svc: ServicesDep) -> Response:
    """Prometheus."""
    if not svc.core.settings.metrics_enabled:
        raise NotFound("metrics are switched off by ECHO2_METRICS_ENABLED")
    return Response(svc.core.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
