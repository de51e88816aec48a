"""What jobs cost, have cost and will have cost: the cost view and the forecast's event.

Invariant: every figure comes from the same reading of leases, ledger and bills; a bill that is not known is null, not
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import budget, forecast, money
from app.fleet.books import books
from app.fleet.core import Core
from app.fleet.tally import Tally, costed, tally
from app.protocol.base import moment, usd
from app.protocol.job import JobStatus
from app.storage.models import Job, Step

FORETOLD = (JobStatus.PROVISIONING, JobStatus.RUNNING)


class Costs:
    """Money of jobs, as the API shows it."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def view(self, session: AsyncSession, jobs: Sequence[Job]) -> dict[str, Any]:
        """Money of one job, or of many."""
        return self._view(jobs, tally(await costed(session, [j.id for j in jobs]), self.core.clock()))

    def _view(self, jobs: Sequence[Job], found: Tally) -> dict[str, Any]:
        spent, steps = sum(found.by_kind.values()), sum(j.step for j in jobs)
        committed = sum(self._exposure(j, found.live.get(j.id, ()), found.over.get(j.id, 0)).committed for j in jobs)
        return {
            "budget_usd": usd(sum(j.budget_micros for j in jobs)),
            "spent_usd": usd(spent),
            "committed_usd": usd(committed),
            "provider_bill_usd": usd(found.billed) if found.billed is not None else None,
            "by_kind": {k: usd(v) for k, v in found.by_kind.items()},
            "by_provider": {k: usd(v) for k, v in found.by_provider.items()},
            "leases": found.rows,
            "usd_per_step": usd(round(spent / steps)) if steps else None,
            "steps": steps,
        }

    async def job(self, session: AsyncSession, job: Job) -> dict[str, Any]:
        """Money of one job, with its forecast."""
        found = tally(await costed(session, [job.id]), self.core.clock())
        exposure = self._exposure(job, found.live.get(job.id, ()), found.over.get(job.id, 0))
        expected = await self._expected(session, job, exposure)
        return {**self._view([job], found), "forecast": forecast_view(expected)}

    async def expect(self, session: AsyncSession, job: Job) -> forecast.Forecast:
        """What to expect of the job."""
        found = await books(session, job.id)
        return await self._expected(session, job, self._exposure(job, found.leases, found.before))

    async def _expected(self, session: AsyncSession, job: Job, exposure: budget.Exposure) -> forecast.Forecast:
        recent = select(Step).where(Step.job_id == job.id).order_by(Step.step.desc()).limit(forecast.RECENT + 1)
        steps = sorted(await session.scalars(recent), key=lambda s: s.step)
        course = forecast.Course(
            now=self.core.clock(),
            # Of a job that is over, what a bill may still bring is no forecast.
            spent=exposure.spent + (0 if job.finished_at is not None else exposure.unseen),
            burn_micros_h=exposure.burn_micros_h + exposure.pending_micros_h,
            wind_down=exposure.wind_down,
            budget=job.budget_micros,
            step=job.step,
            stop_steps=job.spec["stop"].get("steps"),
            stop_in_s=await self._hours_left(session, job, steps),
            marks=[forecast.Mark(s.at, s.spent_micros) for s in steps],
            paused=job.status == JobStatus.PAUSED,
            over_at=job.finished_at,
        )
        return forecast.forecast(course)

    async def watch(self, job_id: str) -> None:
        """Tell once when the forecast crosses the budget, and once when it comes back."""
        async with self.core.db.read() as session:
            if await self._crossed(session, job_id) is None:
                return
        async with self.core.db.write() as session:
            crossed = await self._crossed(session, job_id)
            if crossed is None:
                return
            job, expected = crossed
            job.forecast_over = over = not job.forecast_over
            kind, word = ("forecast_over_budget", "over") if over else ("forecast_within_budget", "within")
            self.core.emit(
                session, job_id, kind,
                f"expected to cost ${usd(expected.cost or 0)}, {word} the budget of ${usd(job.budget_micros)}: "
                f"{expected.basis}",
                **forecast_view(expected),
            )  # fmt: skip
        self.core.announce(job_id)

    async def _crossed(self, session: AsyncSession, job_id: str) -> tuple[Job, forecast.Forecast] | None:
        """The job and its forecast, if that lies on the other side of the budget than was told last."""
        job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
        if job.status not in FORETOLD:
            return None
        expected = await self.expect(session, job)
        over = forecast.over_budget(expected, job.budget_micros, job.forecast_over)
        return None if over == job.forecast_over else (job, expected)

    def _exposure(self, job: Job, leases: Sequence[money.Costed], before: int) -> budget.Exposure:
        kept = self.core.wind_down_s(leases)
        return money.exposure(job, leases, self.core.clock(), kept, before=before)

    async def _hours_left(self, session: AsyncSession, job: Job, steps: Sequence[Step]) -> float | None:
        """Seconds until the job's hours are over, as far as its steps tell; pauses don't count."""
        hours = job.spec["stop"].get("max_hours")
        if hours is None:
            return None
        busy = await session.scalar(select(func.sum(Step.t_train + Step.t_idle)).where(Step.job_id == job.id))
        began = steps[-1].at if steps else job.ready_at
        going = self.core.clock() - began if began is not None and job.status in FORETOLD else 0.0
        return float(hours * 3600 - (busy or 0.0) - going)


def forecast_view(expected: forecast.Forecast) -> dict[str, Any]:
    """A forecast in the contract's words."""

    def dollars(value: int | None) -> str | None:
        return None if value is None else usd(value)

    return {
        "ends_at": moment(expected.ends_at),
        "cost_usd": dollars(expected.cost),
        "low_usd": dollars(expected.low),
        "high_usd": dollars(expected.high),
        "budget_lasts_until": moment(expected.budget_lasts_until),
        "basis": expected.basis,
    }
