"""Jobs as their owners handle them: create, change, pause, cancel.

Invariant: what is wrong with a job and can be known from its text is refused here, before anything starts; a creation
that is repeated with the same idempotency key is the same job.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import select

from app.fleet import proving, staleness
from app.fleet.attached import LOADS, WAITS, is_attached
from app.fleet.core import Core
from app.fleet.lifecycle import Lifecycle
from app.fleet.notify import secret_of
from app.fleet.outward import url_problem
from app.protocol.base import micros, usd
from app.protocol.errors import BadInput, Conflict, FieldError, NotFound, Unavailable
from app.protocol.job import JobSpec, JobStatus
from app.protocol.job_patch import JobPatch
from app.protocol.task_spec import TaskSpec
from app.storage.models import Job, Outbox

BUILT_IN = ("tiny", "small")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")

CHECKS_AT_ONCE = 2
"""Tasks that are loaded side by side. They have threads of their own: a task may take minutes to load, and what else
the service does in threads, giving machines back for one, must not wait for that."""
CHECKS_WAITING = 16

TakeTask = Callable[[TaskSpec, str], TaskSpec]
"""Checks the task of a new job with this id and keeps its files; the spec that comes back names them. Raises BadInput
for a task that does not exist, does not take its parameters, or does not load."""


class Jobs:
    """What `/v1/jobs` does."""

    def __init__(self, core: Core, lifecycle: Lifecycle, take_task: TakeTask) -> None:
        self.core = core
        self.lifecycle = lifecycle
        self.take_task = take_task
        self._checks = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="echo2-task")
        self._checking = 0

    def close(self) -> None:
        """Begin no more checks of tasks."""
        self._checks.shutdown(wait=False, cancel_futures=True)

    async def _take_task(self, task: TaskSpec, job_id: str) -> TaskSpec:
        """The task with its files. Raises BadInput, or Unavailable while too many others are being loaded."""
        if self._checking >= CHECKS_WAITING:
            raise Unavailable(f"{self._checking} other jobs wait for their tasks to be loaded: try again in a minute")
        self._checking += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._checks, self.take_task, task, job_id)
        finally:
            self._checking -= 1

    async def create(self, spec: JobSpec, owner: str, idempotency_key: str | None) -> Job:
        """A new pending job, or the one that this owner made with this key before."""
        self._check_names(spec)
        job_id = _job_id(owner, idempotency_key)
        spec = spec.model_copy(update={"task": await self._take_task(spec.task, job_id)})
        now = self.core.clock()
        async with self.core.db.write() as session:
            before = (await session.scalars(select(Job).where(Job.id == job_id))).first()
            if before is not None:
                if before.spec != spec.model_dump(mode="json"):
                    raise Conflict("this Idempotency-Key was used for another job; use a new one")
                return before
            job = Job(
                id=job_id,
                name=spec.name,
                spec=spec.model_dump(mode="json"),
                status=JobStatus.PENDING,
                status_reason=WAITS if spec.learner.placement == "attached" else LOADS,
                status_since=now,
                created_at=now,
                budget_micros=spec.budget_micros,
                max_nodes=spec.fleet.max_nodes,
                staleness_budget=spec.first_staleness,
                publish_period=spec.first_period,
                assets=[],
                capacity={},
            )
            session.add(job)
            await session.flush()
            if spec.notify_url is not None:
                session.add(Outbox(job_id=job.id, next_at=now))
            self.core.emit(
                session, job.id, "job_created",
                f"{spec.name or spec.task.name}: {spec.model}, S = {job.staleness_budget}, κ = {job.publish_period}, "
                f"R = {spec.rollouts_per_step}, budget ${usd(spec.budget_micros)}",
            )  # fmt: skip
        self.core.signals.notify("tick")
        return job

    def _check_names(self, spec: JobSpec) -> None:
        errors = []
        known = sorted(self.core.providers)
        for index, name in enumerate(spec.fleet.providers):
            if name not in self.core.providers:
                errors.append(FieldError(f"/fleet/providers/{index}", f"{name!r} is not one of {known}"))
        problem = _model_problem(spec.model)
        if problem:
            errors.append(FieldError("/model", problem))
        if problem := proving.problem(self.core.settings.agent_engine, spec.trust.proofs):
            errors.append(FieldError("/trust/proofs", problem))
        if spec.notify_url is not None and (problem := self._notify_problem(spec.notify_url)):
            errors.append(FieldError("/notify_url", problem))
        if errors:
            first = f"{errors[0].pointer}: {errors[0].detail}"
            raise BadInput(f"the job can't be run as it is: {first}", errors=errors)

    def _notify_problem(self, url: str) -> str:
        settings = self.core.settings
        if secret_of(settings) is None:
            return "this service has no secret to sign with: set ECHO2_NOTIFY_SECRET, or leave notify_url out"
        return url_problem(url, allow_private=settings.notify_allow_private)

    async def get(self, job_id: str) -> Job:
        """A job by id. Raises NotFound."""
        async with self.core.db.read() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).first()
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        return job

    async def learner_token(self, job_id: str) -> str:
        """What an attached learner proves itself with. Raises NotFound, Conflict for a job that needs none."""
        job = await self.get(job_id)
        if not is_attached(job):
            raise Conflict("this service starts the job's learner itself: learner.placement is not attached")
        if JobStatus(job.status).final:
            raise Conflict(f"the job is {job.status}")
        return self.core.secrets.learner_token(job_id)

    async def patch(self, job_id: str, change: JobPatch) -> Job:
        """Change what may change while it runs. Raises Conflict when it is over, BadInput when it can't be so."""
        await self.get(job_id)
        async with self.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            if JobStatus(job.status).final or job.status == JobStatus.DRAINING:
                raise Conflict(f"the job is {job.status}; nothing can be changed any more")
            told = []
            if change.budget_usd is not None:
                job.budget_micros = micros(change.budget_usd)
                told.append(f"budget ${usd(job.budget_micros)}")
            if change.staleness_budget is not None:
                staleness.change(job, change.staleness_budget)
                told.append(f"S = {job.staleness_budget}, κ = {job.publish_period}")
            if change.fleet is not None:
                job.max_nodes = change.fleet.max_nodes
                told.append(f"max_nodes {job.max_nodes}")
            if told:
                self.core.emit(session, job_id, "job_changed", "changed: " + ", ".join(told))
        self.core.announce(job_id, "work")
        self.core.signals.notify("tick")
        return job

    async def cancel(self, job_id: str) -> Job:
        """End it: checkpoint, give everything back. Cancelling what is over is a conflict, twice is fine."""
        await self.get(job_id)
        async with self.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            if job.status != JobStatus.CANCELLED:
                if JobStatus(job.status).final:
                    raise Conflict(f"the job is {job.status}")
                job.outcome = job.outcome or JobStatus.CANCELLED
                self.lifecycle.move(session, job, JobStatus.DRAINING, "cancelled by its owner")
        self.core.announce(job_id, "work")
        self.core.signals.notify("tick")
        return job

    async def pause(self, job_id: str) -> Job:
        """Give every node back and let the learner wait."""
        return await self._switch(job_id, JobStatus.PAUSED, "paused by its owner")

    async def resume(self, job_id: str) -> Job:
        """Go on after a pause."""
        return await self._switch(job_id, JobStatus.PROVISIONING, "resumed by its owner")

    async def _switch(self, job_id: str, status: JobStatus, reason: str) -> Job:
        await self.get(job_id)
        async with self.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            pausing = status is JobStatus.PAUSED
            fitting = (JobStatus.PROVISIONING, JobStatus.RUNNING) if pausing else (JobStatus.PAUSED,)
            already = (JobStatus.PAUSED,) if pausing else (JobStatus.PROVISIONING, JobStatus.RUNNING)
            if job.status not in (*fitting, *already):
                raise Conflict(f"the job is {job.status}, not {' or '.join(s.value for s in fitting)}")
            if job.status in fitting:
                self.lifecycle.move(session, job, status, reason)
        self.core.announce(job_id, "work")
        self.core.signals.notify("tick")
        return job


def _job_id(owner: str, idempotency_key: str | None) -> str:
    """Random, or decided by owner and key: then a crash between creating and answering can't make two."""
    if idempotency_key is None:
        return "job_" + secrets.token_hex(8)
    return "job_" + hashlib.sha256(f"{owner}\0{idempotency_key}".encode()).hexdigest()[:16]


def _model_problem(model: str) -> str:
    """What is wrong with the name of a model, as far as it can be told without loading it."""
    if model in BUILT_IN or (_HUB_ID.fullmatch(model) and not Path(model).exists()):
        return ""
    path = Path(model)
    if path.is_absolute() or model.startswith("."):
        try:
            return "" if (path / "config.json").is_file() else f"{model} is not a folder with a config.json"
        except OSError as error:
            return f"the folder can't be read: {error.strerror}"
    return 'must be "tiny" or "small", a Hugging Face id (org/name), or the path of a local model folder'
