"""`/v1/agent`: what a machine needs to install the agent. No key: there is nothing secret in it. No decisions here."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from app.api.deps import ServicesDep
from app.fleet import pins

router = APIRouter(prefix="/v1/agent", tags=["nodes"])


@router.get("/constraints", response_class=PlainTextResponse)
async def constraints(
    svc: ServicesDep, engine: Annotated[str, Query(pattern=r"^[a-z][a-z0-9_]{0,31}$")] = "transformers"
) -> PlainTextResponse:
    """Exact versions, as pip's `-c` takes them: the operator's file, else what this service runs with."""
    own = svc.core.settings.agent_constraints
    return PlainTextResponse(await asyncio.to_thread(pins.constraints, engine, own))
