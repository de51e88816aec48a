"""`/v1/jobs/{id}/fleet`, `/cost`, `/v1/fleet`, `/v1/cost`, `/v1/offers`. No decisions here."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select

from app.api.deps import CallerDep, Services, ServicesDep
from app.api.paging import Cursor, Limit
from app.api.tables import table, text_response, wants_text
from app.fleet.offers import TEXT_COLUMNS, default_view, offer_view, ranked_for, text_row
from app.fleet.priced import JobView
from app.fleet.ranking import barred
from app.fleet.sight import job_view
from app.protocol.base import usd
from app.protocol.job import FINAL_STATUSES
from app.protocol.paging import decode, encode
from app.storage.models import Job

router = APIRouter(prefix="/v1", tags=["fleet"])

NODE_COLUMNS = (
    "id", "gpu_name", "machine_id", "state", "price_per_hour", "rho", "mu_measured", "policy_version", "chain",
    "chain_position", "upstream", "rollouts_accepted", "heartbeat_age", "phase", "phase_age",
)  # fmt: skip
LEASE_COLUMNS = (
    "id", "provider", "machine_id", "gpu_name", "state", "quoted_per_hour", "billed_per_hour", "effective_per_hour",
    "from", "to", "spent_usd", "provider_bill_usd",
)  # fmt: skip
FORECAST_COLUMNS = ("ends_at", "cost_usd", "low_usd", "high_usd", "budget_lasts_until", "basis")
PROVIDER_COLUMNS = ("name", "usable", "credit_usd", "usd_per_hour", "reason")
CAP_COLUMNS = ("usd_per_hour", "max_usd_per_hour", "committed_usd", "max_usd_total")


def _fleet_text(view: dict[str, Any]) -> str:
    capacity = view["capacity"]
    shown = ("mu_min", "mu_target", "mu_steered", "mu_pool", "feasible", "steering")
    return table([{k: capacity.get(k) for k in shown}], shown) + "\n\n" + table(view["nodes"], NODE_COLUMNS)


def _cost_text(view: dict[str, Any]) -> str:
    totals = {**view, **view["by_kind"]}
    shown = (
        "budget_usd",
        "spent_usd",
        "committed_usd",
        "provider_bill_usd",
        "gpu",
        "disk",
        "download",
        "upload",
        "usd_per_step",
        "steps",
    )
    parts = [table([totals], shown)]
    if "forecast" in view:
        parts.append(table([view["forecast"]], FORECAST_COLUMNS))
    return "\n\n".join([*parts, table(view["leases"], LEASE_COLUMNS)])


@router.get("/jobs/{job_id}/fleet")
async def job_fleet(job_id: str, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Capacity and nodes of a job."""
    job = await svc.jobs.get(job_id)
    async with svc.core.db.read() as session:
        view = await svc.views.fleet(session, [job])
    return text_response(_fleet_text(view)) if wants_text(request) else JSONResponse(view)


@router.get("/jobs/{job_id}/cost")
async def job_cost(job_id: str, request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Money of a job by kind, provider and lease."""
    job = await svc.jobs.get(job_id)
    async with svc.core.db.read() as session:
        view = await svc.views.costs.job(session, job)
    return text_response(_cost_text(view)) if wants_text(request) else JSONResponse(view)


@router.get("/fleet")
async def whole_fleet(request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Nodes of all jobs that are not over, and what ails the providers."""
    async with svc.core.db.read() as session:
        jobs = list(await session.scalars(select(Job).where(Job.status.not_in(list(FINAL_STATUSES)))))
        view = await svc.views.fleet(session, jobs)
        room = await svc.accounts.room(session)
    trouble = {**svc.market.troubles(), **svc.reconciler.trouble, **svc.accounts.troubles()}
    view["caps"] = svc.accounts.view(room)
    view["providers"] = [
        _provider(svc, name, trouble.get(name), room.burns.get(name, 0)) for name in svc.core.providers
    ]
    if wants_text(request):
        parts = (
            _fleet_text(view),
            table(view["providers"], PROVIDER_COLUMNS),
            table([view["caps"]], CAP_COLUMNS),
            table(view["caps"]["held"], ("job_id", "reason")) if view["caps"]["held"] else "",
        )
        return text_response("\n\n".join(part for part in parts if part))
    return JSONResponse(view)


def _provider(svc: Services, name: str, trouble: str | None, burn: int) -> dict[str, Any]:
    credit = svc.accounts.credit(name)
    return {
        "name": name,
        "usable": trouble is None,
        "reason": trouble,
        "credit_usd": None if credit is None else usd(credit),
        "usd_per_hour": usd(burn),
    }


@router.get("/cost")
async def whole_cost(request: Request, who: CallerDep, svc: ServicesDep) -> Response:
    """Money of all jobs."""
    async with svc.core.db.read() as session:
        view = await svc.views.cost(session, list(await session.scalars(select(Job))))
    return text_response(_cost_text(view)) if wants_text(request) else JSONResponse(view)


@router.get("/offers")
async def offers(
    request: Request,
    who: CallerDep,
    svc: ServicesDep,
    job_id: Annotated[str | None, Query()] = None,
    limit: Limit = 200,
    cursor: Cursor = None,
) -> Response:
    """The market as a job sees it, ranked by ρ; without a job for an assumed one, which the answer tells of.

    A cursor counts ranks: what the market did between two pages may show an offer twice, or not at all.
    """
    seen = max(0, decode(cursor) or 0)
    view = await _job_view(svc, job_id)
    names = view.spec.fleet.providers or list(svc.core.providers)
    await svc.market.refresh(names, view.spec.fleet.interruptible, max_age_s=svc.core.settings.offer_refresh_seconds)
    async with svc.core.db.read() as session:
        room = await svc.accounts.room(session)
        view = await svc.market.informed(session, view)
        ranking = await svc.market.ranked(session, view)
    ranked = barred(ranking, lambda p: room.why_not(p.offer.provider, p.price.total))
    rows = [offer_view(p) for p in ranked[seen : seen + limit]]
    more = encode(seen + limit) if len(ranked) > seen + limit else None
    basis = ranked_for(view, job_id)
    if wants_text(request):
        return text_response(f"{basis['text']}\n\n{table([text_row(r) for r in rows], TEXT_COLUMNS)}", more)
    troubles = svc.market.troubles()
    return JSONResponse({"ranked_for": basis, "items": rows, "next_cursor": more, "providers": troubles})


async def _job_view(svc: Services, job_id: str | None) -> JobView:
    if job_id is None:
        return default_view(svc.core.benched)
    await svc.jobs.get(job_id)
    return job_view(await svc.controller.observe(job_id), svc.core.benched)
