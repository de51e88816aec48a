"""How much throughput a job needs now: Eq. 2 with what was measured, and the aim and κ that steering makes of it.

Invariant: what is decided here is kept in the job's row, so that the API shows it and a restart goes on with it.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import broadcasts, capacity, estimates, measured, sight, steering
from app.fleet.core import Core
from app.protocol.job import JobSpec, period
from app.protocol.node import NodeState
from app.storage.models import Job, Step


class Demand:
    """The acting side of `capacity` and `steering`."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def aim(self, session: AsyncSession, seen: sight.Seen) -> float:
        """Eq. 2 with what is measured, what the pool delivers, and the aim that follows; kept for the API.
        Returns the aim."""
        job, spec = seen.job, seen.spec
        # A machine that was given up may have been the last without the newest version.
        await broadcasts.settle(self.core, session, job)
        t_bcast = job.t_bcast if job.t_bcast is not None else self._broadcast_prior(seen)
        need = capacity.plan(
            rollouts=spec.rollouts_per_step,
            kappa=job.publish_period,
            staleness=job.staleness_budget,
            gamma=spec.safety_factor,
            t_train=job.t_train or 1.0,
            t_bcast=t_bcast,
        )
        active = [n for n in seen.nodes.values() if n.state == NodeState.ACTIVE]
        was_feasible = job.capacity.get("feasible")
        steps = await self._steps(session, job)
        times = steering.batch_times(steps, spec.rollouts_per_step) or [job.t_train or 1.0]
        bound = self.core.settings.bubble_bound
        t_batch = steering.held_by(times, steps, usual=estimates.usual_step(times), bound=bound)
        aim = self._steer(session, job, spec, need.mu_target, t_batch, steps)
        fastest = estimates.fastest_step(times)
        job.capacity = {
            **need.as_dict(),
            "mu_pool": sum(n.mu_measured or 0.0 for n in active),
            "mu_steered": aim.target,
            "mu_lasting": aim.target * max(1.0, t_batch / fastest) if fastest > 0 else aim.target,
            "mu_knee": aim.knee,
            "steering": aim.why,
            "steering_state": [aim.factor, aim.since_step, aim.near],
            "nodes_active": len(active),
            "t_train": job.t_train,
            "t_bcast": t_bcast,
        }
        job.nodes_peak = max(job.nodes_peak, len(active))
        metrics = self.core.metrics
        metrics.mu_pool.labels(job.id).set(job.capacity["mu_pool"])
        metrics.mu_target.labels(job.id).set(need.mu_target)
        metrics.mu_steered.labels(job.id).set(aim.target)
        metrics.mu_min.labels(job.id).set(need.mu_min or 0.0)
        if need.feasible != was_feasible and not (need.feasible and was_feasible is None):
            kind = "capacity_feasible" if need.feasible else "capacity_infeasible"
            self.core.emit(
                session, job.id, kind, need.explanation or "the broadcast fits into the publish period again"
            )
        return aim.target

    async def _steps(self, session: AsyncSession, job: Job) -> list[steering.Seen]:
        query = select(Step).where(Step.job_id == job.id).order_by(Step.step.desc()).limit(steering.LONGEST_WINDOW)
        return [
            steering.Seen(
                s.step, s.t_train, s.t_idle, s.rollouts, s.dropped, s.mu_pool, max(map(int, s.lags), default=None)
            )
            for s in reversed(list(await session.scalars(query)))
        ]

    def _steer(
        self, session: AsyncSession, job: Job, spec: JobSpec, eq2: float, t_batch: float, steps: list[steering.Seen]
    ) -> steering.Aim:
        """The aim by what the newest steps showed; a move of it, or of κ, is an event. `t_batch`: seconds for R."""
        factor, since, *near = job.capacity.get("steering_state", [None, 0])
        aim = steering.steer(
            (factor, since, bool(near and near[0])),
            eq2=eq2,
            rollouts=spec.rollouts_per_step,
            gamma=spec.safety_factor,
            t_train=t_batch,
            kappa=job.publish_period,
            staleness=job.staleness_budget,
            allowed=steering.periods(
                period(job.staleness_budget, spec.publish_period),
                fixed=spec.publish_period is not None,
                t_train=job.t_train or 1.0,
                t_bcast=job.t_bcast,
            ),
            steps=steps,
            bound=self.core.settings.bubble_bound,
        )
        if aim.kappa != job.publish_period:
            self.core.emit(session, job.id, "publish_period_steered", aim.why, before=job.publish_period, now=aim.kappa)
            job.publish_period = aim.kappa
        elif aim.moved:
            self.core.emit(
                session, job.id, "capacity_steered",
                f"the pool is held at {aim.target:.4g} rollouts/s (Eq. 2: {eq2:.4g}, R/T_train: {aim.knee:.4g}): "
                f"{aim.why}",
            )  # fmt: skip
        return aim

    def _broadcast_prior(self, seen: sight.Seen) -> float:
        """T_bcast before one was measured."""
        known = [(seen.nodes.get(x.id), x) for x in seen.usable]
        links = [rate for n, x in known if (rate := min(measured.up_mbps(n, x), measured.down_mbps(n, x)))]
        size = seen.job.publish_bytes or seen.job.snapshot_bytes or 0
        uplink = measured.learner_link(seen.job, self.core.settings.learner_uplink_mbps).mbps
        return estimates.broadcast_time(size, max(1, len(links)), uplink, min(links, default=min(uplink, 100.0)))
