"""The life of a job: pending → provisioning → running → draining → its end.

Invariant: a job ends only when its learner is done (or given up) and no lease of it is open; every wait has a reason
and a since-when.
"""

from __future__ import annotations

import logging

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import budget, money, storewatch
from app.fleet.attached import AWAY, AWAY_S, LOADS, WAITS, Presence, is_attached, presence, waiting
from app.fleet.books import Books, books
from app.fleet.core import Core
from app.fleet.nodes import Nodes
from app.fleet.supervisor import Supervisor
from app.fleet.watchdog import Watchdog
from app.protocol.base import usd
from app.protocol.job import JobSpec, JobStatus
from app.storage.models import Job, Lease, LeaseState, Node

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 1800.0
FINISH_TIMEOUT_S = 600.0
RENTS = "renting the first nodes"


class Lifecycle:
    """Moves jobs from state to state."""

    def __init__(self, core: Core, nodes: Nodes, supervisor: Supervisor) -> None:
        self.core = core
        self.nodes = nodes
        self.supervisor = supervisor
        self.watchdog = Watchdog(core)

    async def tick(self, job_id: str) -> None:
        """One round for one job."""
        start_learner = False
        async with self.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            status = JobStatus(job.status)
            if status.final:
                return
            await self.nodes.expire(session, job)
            found = await books(session, job_id)
            leases = found.leases
            stuck = await self.watchdog.check(session, job)
            if stuck is not None:
                self.end(session, job, JobStatus.FAILED, stuck)
            if status is not JobStatus.DRAINING and not self._end_if_due(session, job, found):
                start_learner = self._learner(session, job)
                self._advance(session, job, leases)
            if job.status == JobStatus.DRAINING:
                start_learner = await self._draining(session, job, leases)
            if job.status == JobStatus.PAUSED:
                await self._give_all_back(session, job, leases, "the job is paused")
            if job.status == JobStatus.PENDING and is_attached(job):
                await self._give_all_back(session, job, leases, f"the job {WAITS}")
        if start_learner:
            await self.supervisor.start(job_id)
        if JobStatus(job.status).final:
            if not is_attached(job):
                self.supervisor.stop(job)
            self.core.announce(job_id)

    def move(self, session: AsyncSession, job: Job, status: JobStatus, reason: str) -> None:
        """Change the status, with reason and since-when."""
        if job.status == status:
            return
        job.status, job.status_reason, job.status_since = status, reason, self.core.clock()
        if status is JobStatus.RUNNING and job.started_at is None:
            job.started_at = self.core.clock()
        if status.final:
            job.finished_at = self.core.clock()
        self.core.emit(
            session, job.id, f"job_{status.value}", f"job is {status.value}" + (f": {reason}" if reason else "")
        )

    def end(self, session: AsyncSession, job: Job, outcome: JobStatus, reason: str) -> None:
        """Begin to end: the learner is asked to finish, everything is given back, then the job has this status."""
        if job.status == JobStatus.DRAINING and job.outcome is not None:
            return
        job.outcome = job.outcome or outcome
        self.move(session, job, JobStatus.DRAINING, reason)

    def _end_if_due(self, session: AsyncSession, job: Job, found: Books) -> bool:
        """Begin to drain when the learner is done or finishing, the money runs out, or time is up."""
        spec, now = JobSpec.model_validate(job.spec), self.core.clock()
        if job.outcome is not None or job.learner_done:
            self.move(session, job, JobStatus.DRAINING, job.status_reason or "the learner is done")
            return True
        if job.learner_state == "finishing" or (spec.stop.steps is not None and job.step >= spec.stop.steps):
            self.move(session, job, JobStatus.DRAINING, "the stop rule is met; the learner saves the model")
            return True
        kept = self.core.wind_down_s(found.leases)
        exposure = money.exposure(job, found.leases, now, kept, before=found.before)
        if budget.must_wind_down(exposure, self.core.settings.tick_seconds * 3):
            self.end(
                session, job, JobStatus.BUDGET_EXHAUSTED,
                f"${usd(exposure.committed)} of ${usd(exposure.budget)} are committed; winding down",
            )  # fmt: skip
            return True
        return False

    def _learner(self, session: AsyncSession, job: Job) -> bool:
        """Whether a learner has to be started. A job whose learner keeps dying fails."""
        stored = self._stored(session, job)
        if stored and is_attached(job) and not job.learner_done:
            self._await(session, job)
        if job.learner_done or self._alive(job):
            started = job.learner_started_at
            late = started is not None and self.core.clock() - started > READY_TIMEOUT_S
            if job.ready_at is None and late:
                self.end(session, job, JobStatus.FAILED, f"the learner was not ready within {READY_TIMEOUT_S:.0f} s")
            return False
        if is_attached(job) or not stored:
            return False
        if self.supervisor.exhausted(job):
            tail = self.supervisor.log_tail(job.id)
            self.end(
                session, job, JobStatus.FAILED, f"the learner ended {job.learner_starts} times; its last words: {tail}"
            )
            return False
        if job.learner_starts:
            self.core.emit(
                session, job.id, "learner_restarted", "the learner is gone; starting it again from its checkpoint"
            )
        job.learner_starts += 1
        return True

    def _stored(self, session: AsyncSession, job: Job) -> bool:
        """Whether a job has its object store, or does not depend on it now: one without machines waits for it, and says
        so; with machines, a learner that can't get on must fail in the end, for they cost."""
        if job.status != JobStatus.PENDING:
            return True
        away, waited = self.core.store.away, job.status_reason.startswith(storewatch.WAITS)
        if away is None:
            if waited:
                job.status_reason, job.status_since = LOADS, self.core.clock()
                self.core.emit(session, job.id, "store_back", "the object store can be used again")
            return True
        reason = f"{storewatch.WAITS}: {away.why}"
        if not waited:
            job.status_since = self.core.clock()
        if job.status_reason != reason:
            job.status_reason = reason
            self.core.emit(session, job.id, "store_away", f"the job {reason}")
        return False

    def _alive(self, job: Job) -> bool:
        return self._presence(job) is Presence.HERE if is_attached(job) else self.supervisor.alive(job)

    def _presence(self, job: Job) -> Presence:
        return presence(job.learner_seen_at, self.core.clock(), self.core.started_at)

    def _await(self, session: AsyncSession, job: Job) -> None:
        """Say what a job does that has no learner, or has none any more."""
        found = self._presence(job)
        if found in (Presence.AWAY, Presence.GONE) and job.learner_state != AWAY:
            job.learner_state = AWAY
            said = f"the attached learner is silent; its nodes stay for {AWAY_S:.0f} s"
            self.core.emit(session, job.id, "learner_away", said)
        if found is Presence.GONE and job.status in (JobStatus.PROVISIONING, JobStatus.RUNNING):
            self.move(session, job, JobStatus.PENDING, waiting(job, found))
        reason = waiting(job, found)
        if job.status == JobStatus.PENDING and job.status_reason != reason:
            job.status_reason, job.status_since = reason, self.core.clock()

    def _advance(self, session: AsyncSession, job: Job, leases: list[Lease]) -> None:
        ready = job.ready_at is not None and job.published_version is not None
        if is_attached(job):
            # One that comes again has to load first.
            ready = ready and self._alive(job) and job.learner_state not in ("loading", AWAY)
        if job.status == JobStatus.PENDING and ready:
            self.move(session, job, JobStatus.PROVISIONING, RENTS)
        elif job.status == JobStatus.PROVISIONING and job.step > 0:
            self.move(session, job, JobStatus.RUNNING, "")

    async def _give_all_back(self, session: AsyncSession, job: Job, leases: list[Lease], reason: str) -> bool:
        """Release every open lease. True when none is open any more."""
        still = [x for x in leases if LeaseState(x.state).open]
        for lease in still:
            if lease.state != LeaseState.RELEASING:
                await self.nodes.retire(session, lease, reason)
        for node in await session.scalars(select(Node).where(Node.job_id == job.id, Node.drain.is_(True))):
            lease = await session.get_one(Lease, node.lease_id)
            if LeaseState(lease.state).usable and self.core.clock() - node.state_since > 5.0:
                self.nodes.leases.request_release(session, lease, reason)
        return not still

    async def _draining(self, session: AsyncSession, job: Job, leases: list[Lease]) -> bool:
        """Give everything back, wait for the learner's last word, end. True if the learner has to be started again."""
        empty = await self._give_all_back(session, job, leases, f"the job ends: {job.status_reason}"[:300])
        given_up = self.core.clock() - job.status_since > FINISH_TIMEOUT_S
        alive = self._alive(job)
        if not job.learner_done and not alive and not given_up and self._worth_a_restart(job):
            # It died while it saved the model: what it had is in its checkpoint.
            if is_attached(job):
                return False
            job.learner_starts += 1
            return True
        if not empty or (alive and not job.learner_done and not given_up):
            return False
        for lease in leases:
            if lease.ended_at is not None:
                money.close(session, lease, lease.ended_at, self.core.metrics)
        outcome = JobStatus(job.outcome or (JobStatus.SUCCEEDED if job.learner_done else JobStatus.FAILED))
        # A job that fails for another reason tells its learner to drop everything.
        told = job.learner_done or outcome is JobStatus.FAILED
        reason = job.status_reason if told else f"{job.status_reason}; the learner did not finish"
        self.move(session, job, outcome, reason)
        return False

    def _worth_a_restart(self, job: Job) -> bool:
        """Whether there is something to save: a job that was ready, and whose learner has not died too often."""
        return job.ready_at is not None and job.outcome != JobStatus.FAILED and not self.supervisor.exhausted(job)
