"""`/v1/jobs`: create, read, change, end. No decisions here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.api.deps import CallerDep, Services, ServicesDep
from app.api.idempotency import key_of, once
from app.api.paging import Cursor, Limit
from app.api.tables import table, text_response, wants_text
from app.protocol.errors import BadInput, FieldError
from app.protocol.job import JobSpec, JobStatus
from app.protocol.job_patch import JobPatch
from app.protocol.paging import decode, encode
from app.storage.models import Event, Job, Step

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JOB_COLUMNS = ("id", "name", "status", "step", "eval", "nodes_mu", "bubble", "spent_usd", "budget_usd")
STEP_COLUMNS = ("step", "at", "reward", "t_train", "t_idle", "rollouts", "dropped", "nodes", "mu_pool", "spent_usd")
EVENT_COLUMNS = ("id", "at", "kind", "message")


def _row(view: dict[str, Any]) -> dict[str, Any]:
    bubble = view["learner"]["bubble_ratio"]
    return {
        **view,
        "eval": view["reward"]["eval"],
        "nodes_mu": view["capacity"]["mu_pool"],
        "bubble": bubble,
        "spent_usd": view["cost"]["spent_usd"],
    }


async def _view(svc: Services, job: Job) -> dict[str, Any]:
    async with svc.core.db.read() as session:
        return await svc.views.job(session, job)


@router.post("", status_code=201)
async def create_job(spec: JobSpec, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Start a job."""

    async def act() -> tuple[int, dict[str, Any], str | None]:
        job = await svc.jobs.create(spec, who.id, key_of(request))
        return 201, await _view(svc, job), f"/v1/jobs/{job.id}"

    return await once(request, svc, who.id, act)


@router.get("")
async def list_jobs(
    request: Request,
    who: CallerDep,
    svc: ServicesDep,
    limit: Limit = 50,
    cursor: Cursor = None,
    status: Annotated[JobStatus | None, Query()] = None,
) -> Response:
    """Jobs, newest first."""
    before = decode(cursor)
    query = select(Job).order_by(Job.seq.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(Job.seq < before)
    if status is not None:
        query = query.where(Job.status == status)
    async with svc.core.db.read() as session:
        jobs = list(await session.scalars(query))
        views = [await svc.views.job(session, job) for job in jobs[:limit]]
    more = encode(jobs[limit - 1].seq) if len(jobs) > limit else None
    if wants_text(request):
        return text_response(table([_row(v) for v in views], JOB_COLUMNS), more)
    return JSONResponse({"items": views, "next_cursor": more})


@router.get("/{job_id}")
async def get_job(job_id: str, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """One job."""
    view = await _view(svc, await svc.jobs.get(job_id))
    return text_response(table([_row(view)], JOB_COLUMNS)) if wants_text(request) else JSONResponse(view)


@router.patch("/{job_id}")
async def patch_job(job_id: str, change: JobPatch, who: CallerDep, svc: ServicesDep) -> Response:
    """Change budget, staleness budget or the largest fleet."""
    return JSONResponse(await _view(svc, await svc.jobs.patch(job_id, change)))


@router.post("/{job_id}/cancel", status_code=202)
async def cancel_job(job_id: str, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Checkpoint, give everything back, end."""

    async def act() -> tuple[int, dict[str, Any], str | None]:
        return 202, await _view(svc, await svc.jobs.cancel(job_id)), None

    return await once(request, svc, who.id, act)


@router.post("/{job_id}/pause", status_code=202)
async def pause_job(job_id: str, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Give every node back; the learner waits."""

    async def act() -> tuple[int, dict[str, Any], str | None]:
        return 202, await _view(svc, await svc.jobs.pause(job_id)), None

    return await once(request, svc, who.id, act)


@router.post("/{job_id}/resume", status_code=202)
async def resume_job(job_id: str, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Go on after a pause."""

    async def act() -> tuple[int, dict[str, Any], str | None]:
        return 202, await _view(svc, await svc.jobs.resume(job_id)), None

    return await once(request, svc, who.id, act)


@router.post("/{job_id}/learner-token")
async def learner_token(job_id: str, who: CallerDep, svc: ServicesDep) -> dict[str, str]:
    """What an attached learner is started with. The same one each time; it opens this job's learner calls only."""
    token = await svc.jobs.learner_token(job_id)
    return {"job_id": job_id, "token": token, "control_url": svc.core.settings.public_url}


@router.get("/{job_id}/steps")
async def list_steps(
    job_id: str, request: Request, who: CallerDep, svc: ServicesDep, limit: Limit = 200, cursor: Cursor = None
) -> Response:
    """One row a learner step, oldest first."""
    await svc.jobs.get(job_id)
    after = decode(cursor) or 0
    query = select(Step).where(Step.job_id == job_id, Step.step > after).order_by(Step.step).limit(limit + 1)
    async with svc.core.db.read() as session:
        rows = list(await session.scalars(query))
    views = [svc.views.step(row) for row in rows[:limit]]
    more = encode(rows[limit - 1].step) if len(rows) > limit else None
    if wants_text(request):
        return text_response(table(views, STEP_COLUMNS), more)
    return JSONResponse({"items": views, "next_cursor": more})


@router.get("/{job_id}/events")
async def list_events(
    job_id: str,
    request: Request,
    who: CallerDep,
    svc: ServicesDep,
    limit: Limit = 200,
    cursor: Cursor = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """History, oldest first; with `Accept: text/event-stream` a live stream from `Last-Event-ID` on."""
    await svc.jobs.get(job_id)
    if "text/event-stream" in request.headers.get("accept", ""):
        return EventSourceResponse(_stream(svc, job_id, _event_id(last_event_id)), ping=15)
    rows = await _events(svc, job_id, decode(cursor) or 0, limit + 1)
    views = [svc.views.event(row) for row in rows[:limit]]
    more = encode(rows[limit - 1].id) if len(rows) > limit else None
    if wants_text(request):
        return text_response(table(views, EVENT_COLUMNS), more)
    return JSONResponse({"items": views, "next_cursor": more})


def _event_id(value: str | None) -> int:
    if value is None or value == "":
        return 0
    if not value.isdecimal() or len(value) > 18:
        raise BadInput("Last-Event-ID must be the id of an event", errors=[FieldError("/Last-Event-ID", "a number")])
    return int(value)


async def _events(svc: Services, job_id: str, after: int, limit: int) -> list[Event]:
    async with svc.core.db.read() as session:
        query = select(Event).where(Event.job_id == job_id, Event.id > after).order_by(Event.id).limit(limit)
        return list(await session.scalars(query))


async def _stream(svc: Services, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    """Events as they come, and the end once the job is over and all were sent."""
    while True:
        news = svc.core.signals.subscribe(f"job:{job_id}")
        rows = await _events(svc, job_id, after, 500)
        for row in rows:
            after = row.id
            data = JSONResponse(svc.views.event(row)).body
            yield ServerSentEvent(bytes(data).decode(), id=str(row.id), event=row.kind)
        if rows:
            continue
        if JobStatus((await svc.jobs.get(job_id)).status).final and not await _events(svc, job_id, after, 1):
            return
        await asyncio.sleep(0)
        await svc.core.signals.wait(news, 5.0)
