"""What a job's learner is told with every answer.

Invariant: an answer says the whole of what is wanted, so that a lost one changes nothing; of evaluations it tells more
than can end between two answers.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import model_files, staleness
from app.protocol.job import JobStatus
from app.protocol.learner import HeldOut, LearnerDirectives
from app.storage.models import Evaluation, Job

_TOLD = 8
"""Evaluations that are told again and again, newest version first."""


async def directives(session: AsyncSession, job: Job) -> LearnerDirectives:
    """As the job's row and its evaluations have it in this transaction."""
    command: Literal["run", "pause", "finish", "abort"] = "run"
    if JobStatus(job.status).final or job.outcome == JobStatus.FAILED:
        command = "abort"
    elif job.outcome is not None and job.outcome != JobStatus.SUCCEEDED:
        command = "finish"
    elif job.status == JobStatus.PAUSED:
        command = "pause"
    query = select(Evaluation.step, Evaluation.reward).where(Evaluation.job_id == job.id)
    newest = (await session.execute(query.order_by(Evaluation.step.desc()).limit(_TOLD))).tuples()
    return LearnerDirectives(
        command=command,
        reason=job.status_reason if command != "run" else "",
        staleness_budget=job.staleness_budget,
        publish_period=job.publish_period,
        staleness_bound=staleness.bound(job),
        evaluated_step=job.eval_step,
        evaluated_reward=job.reward_eval if job.eval_step is not None else None,
        evaluations=[HeldOut(step=step, reward=reward) for step, reward in newest],
        store_model=model_files.wanted(job.assets),
    )
