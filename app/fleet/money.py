"""Accrual of leases into the ledger, and a job's exposure.

Invariant: every second of every lease is in exactly one ledger entry or in what is still open; closing twice at the
same moment writes nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import ledger
from app.fleet.budget import Exposure
from app.fleet.metrics import Metrics
from app.protocol.job import JobStatus
from app.storage.models import Job, Lease, LeaseState, LedgerEntry

KINDS = ("gpu", "disk", "download", "upload")
BILL_LATE_S = 6 * 3600.0
"""So long after a lease's end its provider's bill may still bring what its start downloaded."""
CLOSE_EVERY_S = 60.0
"""Entries are closed at least this often; more often only when the rate changes or the lease ends."""


class Costed(Protocol):
    """What the money of a lease is computed from: a lease, or a row with these columns of it."""

    provider: str
    state: str
    created_at: float
    exists_since: float | None
    ended_at: float | None
    rate_micros_h: int
    effective_micros_h: int
    gpu_since: float | None
    gpu_running: bool
    gpu_until: float | None
    gpu_carry: int
    disk_until: float | None
    disk_gb: float
    disk_micros_gb_month: int
    disk_carry: int
    download_micros_gb: int
    download_bytes: int
    download_billed: int
    download_carry: int
    image_micros: int
    model_micros: int
    upload_micros_gb: int
    upload_bytes: int
    upload_billed: int
    upload_carry: int
    spent_gpu: int
    spent_disk: int
    spent_download: int
    spent_upload: int


@dataclass(frozen=True, slots=True)
class Accrued:
    """What is open of one kind: from when, and how much."""

    kind: str
    start: float
    end: float
    amount: ledger.Amount


def open_amounts(lease: Costed, now: float) -> list[Accrued]:
    """What a lease has cost since its last entries."""
    end = lease.ended_at if lease.ended_at is not None else now
    out = []
    if lease.gpu_running and lease.gpu_until is not None:
        amount = ledger.rent(lease.rate_micros_h, end - lease.gpu_until, lease.gpu_carry)
        out.append(Accrued("gpu", lease.gpu_until, max(end, lease.gpu_until), amount))
    if lease.disk_until is not None:
        amount = ledger.disk(lease.disk_micros_gb_month, lease.disk_gb, end - lease.disk_until, lease.disk_carry)
        out.append(Accrued("disk", lease.disk_until, max(end, lease.disk_until), amount))
    start = lease.disk_until if lease.disk_until is not None else lease.created_at
    down = ledger.traffic(lease.download_micros_gb, lease.download_bytes - lease.download_billed, lease.download_carry)
    up = ledger.traffic(lease.upload_micros_gb, lease.upload_bytes - lease.upload_billed, lease.upload_carry)
    out.append(Accrued("download", start, max(end, start), down))
    out.append(Accrued("upload", start, max(end, start), up))
    return out


def close(session: AsyncSession, lease: Lease, now: float, metrics: Metrics) -> None:
    """Write what is open into the ledger and begin a new interval."""
    for item in open_amounts(lease, now):
        timed = item.kind in ("gpu", "disk")
        # An interval too short to cost a micro-dollar is written too: the entries of a lease have no gap.
        if item.amount.micros or (timed and item.end > item.start):
            session.add(
                LedgerEntry(
                    job_id=lease.job_id,
                    lease_id=lease.id,
                    provider=lease.provider,
                    kind=item.kind,
                    start=item.start,
                    end=item.end,
                    micros=item.amount.micros,
                )
            )
            metrics.spent.labels(item.kind).inc(item.amount.micros / 1e6)
        match item.kind:
            case "gpu":
                lease.spent_gpu += item.amount.micros
                lease.gpu_carry, lease.gpu_until = item.amount.carry, item.end
            case "disk":
                lease.spent_disk += item.amount.micros
                lease.disk_carry, lease.disk_until = item.amount.carry, item.end
            case "download":
                lease.spent_download += item.amount.micros
                lease.download_carry, lease.download_billed = item.amount.carry, lease.download_bytes
            case "upload":
                lease.spent_upload += item.amount.micros
                lease.upload_carry, lease.upload_billed = item.amount.carry, lease.upload_bytes


def change_rate(session: AsyncSession, lease: Lease, rate_micros_h: int, now: float, metrics: Metrics) -> None:
    """The GPU costs another rate from now on."""
    if rate_micros_h == lease.rate_micros_h:
        return
    close(session, lease, now, metrics)
    lease.effective_micros_h += rate_micros_h - lease.rate_micros_h
    lease.rate_micros_h = rate_micros_h


def settle(session: AsyncSession, lease: Lease, billed: Mapping[str, int], metrics: Metrics) -> None:
    """The provider's final bill of a lease that is over, by kind: the difference is an entry of its own, of no length.

    Entries that are there stay as they are; a difference may be negative.
    """
    at = lease.ended_at if lease.ended_at is not None else lease.created_at
    lease.image_micros = lease.model_micros = 0
    for kind, amount in spent(lease, at).items():
        difference = billed.get(kind, 0) - amount
        if difference == 0:
            continue
        session.add(
            LedgerEntry(
                job_id=lease.job_id, lease_id=lease.id, provider=lease.provider, kind=kind, start=at, end=at,
                micros=difference,
            )
        )  # fmt: skip
        setattr(lease, f"spent_{kind}", getattr(lease, f"spent_{kind}") + difference)
        if difference > 0:
            # A counter can't fall: what was counted too much stays in it.
            metrics.spent.labels(kind).inc(difference / 1e6)


def spent(lease: Costed, now: float) -> dict[str, int]:
    """Micro-dollars by kind, open amounts included."""
    total = {
        "gpu": lease.spent_gpu,
        "disk": lease.spent_disk,
        "download": lease.spent_download,
        "upload": lease.spent_upload,
    }
    if _settled(lease):
        return total
    for item in open_amounts(lease, now):
        total[item.kind] += item.amount.micros
    return total


def _settled(lease: Costed) -> bool:
    """Whether nothing is open, as of nearly all leases that are over: then nothing has to be computed.

    A carry is always less than a micro-dollar.
    """
    end = lease.ended_at
    return (
        end is not None
        and (lease.disk_until is None or lease.disk_until >= end)
        and (not lease.gpu_running or lease.gpu_until is None or lease.gpu_until >= end)
        and lease.download_bytes == lease.download_billed
        and lease.upload_bytes == lease.upload_billed
    )


def total_spent(leases: Iterable[Costed], now: float) -> int:
    """Micro-dollars of many leases."""
    return sum(sum(spent(lease, now).values()) for lease in leases)


def exposure(job: Job, leases: Sequence[Costed], now: float, wind_down_s: float, *, before: int = 0) -> Exposure:
    """The job's money now; `before` is what its leases cost that are over and not among `leases`.

    A job that drains has used a part of the time that was kept back for it.
    """
    if job.status == JobStatus.DRAINING:
        wind_down_s = max(0.0, wind_down_s - (now - job.status_since))
    return exposure_of(leases, now, budget=job.budget_micros, wind_down_s=wind_down_s, before=before)


def exposure_of(leases: Sequence[Costed], now: float, *, budget: int, wind_down_s: float, before: int = 0) -> Exposure:
    """The money of these leases, and of others that are over and cost `before`. A lease whose fate is unknown counts
    with all that it may cost."""
    live = [x for x in leases if LeaseState(x.state).open and x.ended_at is None]
    unclear = {LeaseState.INTENT, LeaseState.UNKNOWN}
    return Exposure(
        budget=budget,
        spent=before + total_spent(leases, now),
        burn_micros_h=sum(x.effective_micros_h for x in live if x.state not in unclear),
        pending_micros_h=sum(x.effective_micros_h for x in live if x.state in unclear),
        wind_down_s=wind_down_s,
        unseen=sum(_unseen(x, now) for x in live) + sum(start_unseen(x, now) for x in leases),
    )


def promised(leases: Sequence[Lease], sent: Mapping[str, int]) -> int:
    """By how much the rates of these rise, micro-dollars per hour, through bids and acceptances that are `sent` (lease
    → rate) or agreed, and not billed yet."""
    live = [x for x in leases if LeaseState(x.state).open and x.ended_at is None]
    return sum(max(0, max(sent.get(x.id, 0), x.agreed_micros_h) - x.rate_micros_h) for x in live)


def queue_s(providers: Iterable[str], each_s: Mapping[str, float]) -> float:
    """How much longer a lease lives on average when all are given back at once, because destroy calls at a provider
    go `each_s` apart. `providers`: of each lease. Pure."""
    counts = Counter(providers)
    waits = sum(each_s.get(name, 0.0) * n * (n - 1) / 2 for name, n in counts.items())
    return waits / max(1, counts.total())


def _unseen(lease: Costed, now: float) -> int:
    """What may have been billed since the create call without our knowing: a listing will tell."""
    hours = (now - lease.created_at) / 3600
    if lease.exists_since is None:
        return round(lease.effective_micros_h * hours)
    return round(lease.rate_micros_h * hours) if lease.gpu_since is None else 0


def start_unseen(lease: Costed, now: float) -> int:
    """What its start may have cost in downloads beyond those that we know of: its node counts the model's, but was not
    there yet for the image's. The bill will tell, if it does so in time."""
    late = lease.ended_at is not None and now - lease.ended_at >= BILL_LATE_S
    if late or not lease.image_micros + lease.model_micros or lease.state == LeaseState.REFUSED:
        return 0
    # After its end no model comes any more.
    model = max(0, lease.model_micros - spent(lease, now)["download"]) if lease.ended_at is None else 0
    return lease.image_micros + model


async def close_due(session: AsyncSession, now: float, metrics: Metrics) -> None:
    """Close the intervals of all open leases that are older than CLOSE_EVERY_S."""
    open_leases = await session.scalars(
        select(Lease).where(Lease.state.in_([s for s in LeaseState if s.open]), Lease.disk_until.is_not(None))
    )
    for lease in open_leases:
        if lease.disk_until is not None and now - lease.disk_until >= CLOSE_EVERY_S:
            close(session, lease, now, metrics)
