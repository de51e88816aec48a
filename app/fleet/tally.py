"""The money of many leases: read once, in columns, and added up once.

Invariant: the sums and the rows come from one reading, and are those that `money.spent` gives lease by lease. What a
view does not show is not read: a job may have had thousands of leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money
from app.protocol.base import moment, usd
from app.storage.models import OPEN_STATES, Lease, ProviderBill

OPEN = frozenset(OPEN_STATES)
SHOWN = (
    Lease.id, Lease.job_id, Lease.provider, Lease.machine_id, Lease.instance_id, Lease.gpu_name, Lease.state,
    Lease.reason, Lease.state_since, Lease.quoted_micros_h,
)  # fmt: skip
COUNTED = (
    Lease.rate_micros_h, Lease.effective_micros_h, Lease.created_at, Lease.exists_since, Lease.ended_at,
    Lease.gpu_since, Lease.gpu_running, Lease.gpu_until, Lease.gpu_carry, Lease.spent_gpu,
    Lease.disk_until, Lease.disk_gb, Lease.disk_micros_gb_month, Lease.disk_carry, Lease.spent_disk,
    Lease.download_micros_gb, Lease.download_bytes, Lease.download_billed, Lease.download_carry, Lease.spent_download,
    Lease.image_micros, Lease.model_micros,
    Lease.upload_micros_gb, Lease.upload_bytes, Lease.upload_billed, Lease.upload_carry, Lease.spent_upload,
)  # fmt: skip
BILLED = (
    ProviderBill.micros.label("bill_micros"), ProviderBill.through.label("bill_through"),
    ProviderBill.final.label("bill_final"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tally:
    """Micro-dollars of some jobs' leases."""

    by_kind: Mapping[str, int]
    by_provider: Mapping[str, int]
    billed: int | None
    """What the providers say that they bill; None where none has said anything."""
    rows: Sequence[Mapping[str, Any]]
    """Leases that came to exist, oldest first, in the contract's words."""
    live: Mapping[str, Sequence[money.Costed]]
    """Job → its leases that may cost more yet, or whose bill may."""
    over: Mapping[str, int]
    """Job → what its other leases cost."""


async def costed(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[Any]:
    """The leases of these jobs, oldest first: SHOWN, COUNTED and BILLED of each, by name."""
    query = (
        select(*SHOWN, *COUNTED, *BILLED)
        .outerjoin(ProviderBill, ProviderBill.lease_id == Lease.id)
        .where(Lease.job_id.in_(job_ids))
        .order_by(Lease.created_at)
    )
    return (await session.execute(query)).all()


def tally(leases: Iterable[Any], now: float) -> Tally:
    """All of them added up, open amounts included. `leases`: rows of `costed`. Pure."""
    by_kind = dict.fromkeys(money.KINDS, 0)
    by_provider: dict[str, int] = {}
    over: dict[str, int] = {}
    live: dict[str, list[money.Costed]] = {}
    billed: int | None = None
    rows = []
    for lease in leases:
        total = 0
        for kind, amount in money.spent(lease, now).items():
            by_kind[kind] += amount
            total += amount
        by_provider[lease.provider] = by_provider.get(lease.provider, 0) + total
        if (lease.state in OPEN and lease.ended_at is None) or money.start_unseen(lease, now):
            live.setdefault(lease.job_id, []).append(cast(money.Costed, lease))
        else:
            over[lease.job_id] = over.get(lease.job_id, 0) + total
        if lease.bill_micros is not None:
            billed = (billed or 0) + lease.bill_micros
        if lease.exists_since is not None:
            rows.append(lease_row(lease, total))
    return Tally(by_kind, by_provider, billed, rows, live, over)


def lease_row(lease: Any, total: int) -> dict[str, Any]:
    """One lease: quoted, billed and effective price side by side, ours and the provider's sum."""
    bill = lease.bill_micros
    return {
        "id": lease.id,
        "job_id": lease.job_id,
        "provider": lease.provider,
        "machine_id": lease.machine_id,
        "instance_id": lease.instance_id,
        "gpu_name": lease.gpu_name,
        "state": lease.state,
        "reason": lease.reason,
        "since": moment(lease.state_since),
        "quoted_per_hour": usd(lease.quoted_micros_h),
        "billed_per_hour": usd(lease.rate_micros_h),
        "effective_per_hour": usd(lease.effective_micros_h),
        "from": moment(lease.exists_since),
        "to": moment(lease.ended_at),
        "spent_usd": usd(total),
        "provider_bill_usd": usd(bill) if bill is not None else None,
        "provider_bill_until": moment(lease.bill_through),
        "provider_bill_final": lease.bill_final,
    }
