"""What the learner talks to: its epoch, the index of trajectories, steps, publishes, the end.

Invariant: only the newest epoch is listened to; a step counts once, and taking it marks exactly the groups that it
consumed; a learner that resumes from step c gets everything back that was trained on after c.
"""

from __future__ import annotations

import logging
from collections import Counter

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import heldout, model_files, partials, quarantine, replay, staleness, steps, trajectories
from app.fleet.core import Core
from app.fleet.directives import directives
from app.fleet.exams import Exams
from app.fleet.measured import take_learner
from app.fleet.roster import Roster
from app.protocol.audits import AuditAnswer, AuditReport
from app.protocol.errors import Conflict
from app.protocol.job import JobSpec, JobStatus
from app.protocol.learner import (
    Done,
    Drops,
    EvalReport,
    LearnerDirectives,
    LearnerHeartbeat,
    Published,
    Ready,
    ReadyAnswer,
    StartAnswer,
    StartRequest,
    StepReport,
    TrajectoryPage,
)
from app.storage.models import Job, SnapshotRow

log = logging.getLogger(__name__)


class Learning:
    """The control service's side of the learner's protocol."""

    def __init__(self, core: Core, exams: Exams, roster: Roster) -> None:
        self.core = core
        self.exams = exams
        self.roster = roster

    async def start(self, job_id: str, request: StartRequest) -> StartAnswer:
        """A new learner process: the next epoch; older ones are fenced off from here."""
        async with self.core.db.write() as session:
            job = await self._job(session, job_id)
            if JobStatus(job.status).final:
                raise Conflict(f"the job is {job.status}")
            job.learner_epoch += 1
            job.learner_pid, job.learner_state = request.pid, "loading"
            job.learner_seen_at = job.learner_started_at = self.core.clock()
            self.core.emit(session, job_id, "learner_started", f"learner {job.learner_epoch} on {request.host}")
            return StartAnswer(
                job_id=job_id,
                epoch=job.learner_epoch,
                spec=JobSpec.model_validate(job.spec),
                relay_token=self.core.secrets.relay_token(job_id),
                last_step=job.step,
                published_version=job.published_version,
                model_revision=job.model_revision,
                object_store_url=self.core.settings.object_store_url,
                s3_endpoint_url=self.core.settings.s3_endpoint_url,
            )

    async def ready(self, job_id: str, epoch: int, ready: Ready) -> ReadyAnswer:
        """Model and task load. From here on nodes may be rented."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            job.parameters, job.snapshot_bytes = ready.parameters, ready.snapshot_bytes
            job.train_prompts, job.manifest_public_key = ready.train_prompts, ready.manifest_public_key
            job.eval_prompts = ready.eval_prompts
            job.assets = model_files.announced(job.assets, ready.assets)
            job.model_revision = job.model_revision or ready.model_revision
            job.t_train = job.t_train or ready.t_train_prior
            job.ready_at = job.ready_at or self.core.clock()
            job.learner_state = "waiting"
            if ready.resume_step > job.step:
                raise Conflict(
                    f"the learner goes on from step {ready.resume_step}, but {job.step} steps are on record: its "
                    "checkpoint is of a course that was left"
                )
            back = await replay.rewind(session, job, ready.resume_step)
            if ready.staleness is not None and ready.staleness.staleness_budget != job.staleness_budget:
                staleness.adopt(self.core, session, job, ready.staleness)
            planned = await replay.plan(session, job)
            self.core.emit(
                session, job_id, "learner_ready",
                f"learner ready at step {ready.resume_step}: {ready.parameters} parameters, "
                f"{ready.train_prompts} prompts, a step takes about {ready.t_train_prior:.3g} s"
                + (f"; {back} groups are to be trained on again" if back else ""),
            )  # fmt: skip
            answer = ReadyAnswer(**(await directives(session, job)).model_dump(), replay=planned)
        self.core.announce(job_id, "work", "rollouts")
        self.core.signals.notify("tick")
        return answer

    async def heartbeat(self, job_id: str, epoch: int, beat: LearnerHeartbeat) -> LearnerDirectives:
        """The learner lives; what it does now."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            finishing = beat.state == "finishing" and job.learner_state != "finishing"
            job.learner_state = beat.state
            job.bytes_from_learner = max(job.bytes_from_learner, beat.bytes_served)
            if beat.model_stored and model_files.coming(job.assets):
                job.assets = model_files.stored(job.assets)
                self.core.emit(session, job_id, "model_stored", "the model's files are in the object store")
            if await take_learner(session, job, beat, self.core.settings.learner_uplink_mbps):
                await self.roster.links_changed(session, job)
            wanted = await directives(session, job)
        if finishing:
            self.core.signals.notify("tick")
        return wanted

    async def trajectories(self, job_id: str, epoch: int, after: int, wait_s: float) -> TrajectoryPage:
        """Accepted files with groups still to train on, oldest first; waits for news up to `wait_s`."""
        deadline = self.core.clock() + wait_s
        while True:
            news = self.core.signals.subscribe(f"rollouts:{job_id}")
            async with self.core.db.read() as session:
                job = await self._job(session, job_id)
                self._fence(job, epoch)
                page = await trajectories.page(session, job, after)
            left = deadline - self.core.clock()
            if page.items or left <= 0:
                return page
            await self.core.signals.wait(news, min(left, 5.0))

    async def published(self, job_id: str, epoch: int, report: Published) -> LearnerDirectives:
        """A version can be pulled; told again once it is in the object store too."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            job.relay_url = report.relay_url
            row = await session.get(SnapshotRow, (job_id, report.version))
            if row is None:
                row = SnapshotRow(
                    job_id=job_id, version=report.version, bytes=report.bytes, chunks=report.chunks,
                    published_at=self.core.clock(),
                )  # fmt: skip
                session.add(row)
            row.stored = row.stored or report.stored
            row.delta_share, row.delta_note = report.delta_share, report.note
            if report.delta is not None:
                row.delta_base, row.delta_bytes = report.delta.base, report.delta.bytes
                row.delta_chunks = report.delta.chunks
                row.delta_stored = row.delta_stored or report.delta.stored
            if job.published_version is None or report.version > job.published_version:
                job.published_version = report.version
                if report.version > 0:
                    job.publish_bytes = report.bytes if report.delta is None else report.delta.bytes
                if report.version == 0:
                    self.core.emit(session, job_id, "published", f"v0: {report.bytes} bytes in {report.chunks} chunks")
                await self.exams.open_if_due(session, job, report.version)
            wanted = await directives(session, job)
        self.core.announce(job_id, "work")
        return wanted

    async def step(self, job_id: str, epoch: int, report: StepReport) -> LearnerDirectives:
        """One learner step: its groups are trained, once."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            if report.step <= job.step:
                return await directives(session, job)
            if report.step != job.step + 1:
                raise Conflict(f"step {report.step} does not follow step {job.step}")
            await steps.count(self.core, session, job, report)
            if report.staleness is not None:
                staleness.adopt(self.core, session, job, report.staleness)
            wanted = await directives(session, job)
        self.core.announce(job_id, "work")
        if report.step == 1 or wanted.command == "finish":
            self.core.signals.notify("tick")
        return wanted

    async def drops(self, job_id: str, epoch: int, report: Drops) -> LearnerDirectives:
        """A learner that waits tells what it can't use: there is room for others."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            count = await replay.mark_dropped(self.core, session, job, report.dropped)
            if count:
                reasons = Counter(g.reason for g in report.dropped)
                said = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))
                message = f"the learner at step {report.step} can't train on {count} groups: {said}"
                self.core.emit(session, job_id, "groups_dropped", message)
            wanted = await directives(session, job)
        self.core.announce(job_id, "work")
        return wanted

    async def audits(self, job_id: str, epoch: int, report: AuditReport) -> AuditAnswer:
        """What the learner computed again; nodes that it convicts are taken out at once, with what they brought."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            taken = await quarantine.take(self.core, self.roster, session, job, report.audits)
            again = await self.exams.settle(session, job, report.audits)
        await partials.release(self.core, taken.objects)
        if any(audit.heldout for audit in report.audits):
            await heldout.sweep(self.core)
            self.core.announce(job_id)
        if again:
            self.core.announce(job_id, "work")
        if taken.answer.withdrawn:
            self.core.announce(job_id, "work")
            self.core.signals.notify("tick")
        return taken.answer

    async def evaluated(self, job_id: str, epoch: int, report: EvalReport) -> LearnerDirectives:
        """Held-out reward of a version."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            await steps.evaluated(self.core, session, job, report)
            wanted = await directives(session, job)
        self.core.announce(job_id)
        return wanted

    async def done(self, job_id: str, epoch: int, done: Done) -> None:
        """The learner's last word decides the outcome, unless the user or the budget already did."""
        async with self.core.db.write() as session:
            job = await self._current(session, job_id, epoch)
            job.learner_done, job.learner_state = True, "done"
            await self.exams.discard(session, job)
            job.final_prefix = done.final_prefix or job.final_prefix
            if done.status == "failed":
                job.outcome, job.status_reason = JobStatus.FAILED, done.reason
            elif job.outcome is None:
                job.outcome, job.status_reason = JobStatus.SUCCEEDED, done.reason
            self.core.emit(session, job_id, "learner_done", f"{done.status} at step {done.step}: {done.reason}")
        self.core.metrics.learner_step(job_id, {})
        self.core.announce(job_id)
        self.core.signals.notify("tick")

    async def _job(self, session: AsyncSession, job_id: str) -> Job:
        return (await session.scalars(select(Job).where(Job.id == job_id))).one()

    async def _current(self, session: AsyncSession, job_id: str, epoch: int) -> Job:
        """The job, if the caller is its newest learner; being heard from counts as a sign of life."""
        job = await self._job(session, job_id)
        self._fence(job, epoch)
        job.learner_seen_at = self.core.clock()
        return job

    @staticmethod
    def _fence(job: Job, epoch: int) -> None:
        if epoch != job.learner_epoch:
            raise Conflict(f"learner epoch {epoch} was replaced by {job.learner_epoch}")
