"""The leases of a job, as far as its decisions need them.

Invariant: open leases and the newest closed ones are rows; what all older ones cost is one number. So a tick costs the
same after ten thousand leases as after ten.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.storage.models import OPEN_STATES, Lease

RECENT = 200
"""Closed leases that are looked at: as heirs of others, and for what their machines were measured to do."""


@dataclass(frozen=True, slots=True)
class Books:
    """`leases` in no special order; `before` is what the others cost, micro-dollars."""

    leases: list[Lease]
    before: int


async def books(session: AsyncSession, job_id: str) -> Books:
    """The job's leases. Money of a closed lease is closed: its columns say all that it cost."""
    mine = Lease.job_id == job_id
    still = list(await session.scalars(select(Lease).where(mine, Lease.state.in_(OPEN_STATES))))
    over = mine & Lease.state.not_in(OPEN_STATES)
    newest = list(await session.scalars(select(Lease).where(over).order_by(Lease.created_at.desc()).limit(RECENT)))
    cost = Lease.spent_gpu + Lease.spent_disk + Lease.spent_download + Lease.spent_upload
    total = int(await session.scalar(select(func.sum(cost)).where(over)) or 0)
    known = sum(x.spent_gpu + x.spent_disk + x.spent_download + x.spent_upload for x in newest)
    return Books([*still, *newest], total - known)
