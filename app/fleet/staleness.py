"""A job's S and κ while it runs: what its owner changes, and what its learner asks for if they are adaptive.

Invariant: S never exceeds what the owner allowed; κ ≤ max(1, S − 1), and never above a publish period that was fixed.
Capacity, admission and the learner read S and κ of the job's row, so that a change holds for all of them at once.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.core import Core
from app.protocol.errors import BadInput, FieldError
from app.protocol.job import period
from app.protocol.learner import StalenessMove
from app.storage.models import Job


def bound(job: Job) -> int | None:
    """The owner's bound of an adaptive S; None if S is not adaptive."""
    staleness = job.spec.get("staleness")
    return int(staleness["max"]) if staleness and staleness["adaptive"] else None


def change(job: Job, staleness: int) -> None:
    """The owner's new S; of an adaptive one the new bound. Raises BadInput if a fixed publish period doesn't fit."""
    fixed = job.spec.get("publish_period")
    if fixed is not None and fixed > max(1, staleness - 1):
        detail = f"must be at least {fixed + 1} while publish_period is {fixed}"
        raise BadInput(f"staleness_budget {detail}", errors=[FieldError("/staleness_budget", detail)])
    if job.spec.get("staleness"):
        job.spec = {
            **job.spec,
            "staleness_budget": staleness,
            "staleness": {**job.spec["staleness"], "max": staleness},
        }
    job.staleness_budget = staleness if bound(job) is None else min(job.staleness_budget, staleness)
    job.publish_period = period(job.staleness_budget, fixed)


def adopt(core: Core, session: AsyncSession, job: Job, move: StalenessMove) -> None:
    """What the learner of an adaptive job asks for, within the bound; nothing for other jobs."""
    most = bound(job)
    if most is None:
        return
    before = job.staleness_budget
    job.staleness_budget = min(move.staleness_budget, most)
    job.publish_period = period(job.staleness_budget, job.spec.get("publish_period"))
    if job.staleness_budget != before:
        core.emit(
            session, job.id, "staleness_changed",
            f"S {before} → {job.staleness_budget}, κ {job.publish_period}: {move.reason}",
            staleness_budget=job.staleness_budget, publish_period=job.publish_period, reason=move.reason,
        )  # fmt: skip
