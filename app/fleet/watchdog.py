"""Notices when a job stands still.

Invariant: a job that makes no step says so with what each part of it is doing, long before the money is gone; one that
never comes to life again fails and gives everything back.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.core import Core
from app.protocol.job import JobStatus
from app.storage.models import Job, Node, Step, WorkItem

WARN_S, WARN_STEPS = 300.0, 10.0
FAIL_S, FAIL_STEPS = 3600.0, 60.0


def judge(still_s: float, t_train: float | None) -> Literal["ok", "warn", "fail"]:
    """What to make of `still_s` seconds without a step when one takes `t_train`. Pure."""
    step = t_train or 0.0
    if still_s > max(FAIL_S, FAIL_STEPS * step):
        return "fail"
    return "warn" if still_s > max(WARN_S, WARN_STEPS * step) else "ok"


class Watchdog:
    """Looks at one job at a time."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._told: dict[str, int] = {}

    async def check(self, session: AsyncSession, job: Job) -> str | None:
        """Tell of a standstill, once per step; returns why the job has to fail, if it has."""
        if job.status not in (JobStatus.PROVISIONING, JobStatus.RUNNING):
            return None
        last = await session.scalar(select(func.max(Step.at)).where(Step.job_id == job.id))
        still = self.core.clock() - max(last or 0.0, job.status_since, self.core.started_at)
        verdict = judge(still, job.t_train)
        if verdict == "ok":
            return None
        held = self.core.held.get(job.id)
        words = f"no step for {still:.0f} s; {await self._parts(session, job)}"
        if held is not None:
            words, verdict = f"{words}; renting is held up: {held}", "warn"
        if self._told.get(job.id) != job.step:
            self._told[job.id] = job.step
            self.core.emit(session, job.id, "no_progress", words)
        return words if verdict == "fail" else None

    async def _parts(self, session: AsyncSession, job: Job) -> str:
        """What learner, nodes and work are doing."""
        nodes = await session.execute(
            select(Node.state, func.count()).where(Node.job_id == job.id).group_by(Node.state)
        )
        work = await session.execute(
            select(WorkItem.status, func.count()).where(WorkItem.job_id == job.id).group_by(WorkItem.status)
        )
        quiet = self.core.clock() - (job.learner_seen_at or job.created_at)
        parts = [f"learner {job.learner_state or 'not started'}, heard from {quiet:.0f} s ago"]
        parts.append("nodes: " + (", ".join(f"{n} {state}" for state, n in nodes.tuples()) or "none"))
        parts.append("work items: " + (", ".join(f"{n} {status}" for status, n in work.tuples()) or "none"))
        return "; ".join(parts)
