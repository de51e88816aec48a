"""The record of a learner's steps and of its own evaluations.

Invariant: a step is counted once, with all groups that it consumed and dropped; what a job shows as its held-out reward
is that of the newest version that was evaluated, in whatever order the results come.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money, replay, sizes
from app.fleet.books import books
from app.fleet.capacity import bubble_ratio
from app.fleet.core import Core
from app.fleet.estimates import MOST_STEPS, usual_step
from app.protocol.learner import EvalReport, StepReport
from app.protocol.node import NodeState
from app.storage.models import Evaluation, Job, Node, Step


async def count(core: Core, session: AsyncSession, job: Job, report: StepReport) -> None:
    """Put the step that follows the job's last one on record."""
    metrics = core.metrics
    await replay.mark_trained(session, job, report.step, report.trained)
    await replay.mark_dropped(core, session, job, report.dropped)
    now = core.clock()
    found = await books(session, job.id)
    rollouts = await sizes.rollouts(session, job, report.trained)
    dropped = await sizes.rollouts(session, job, [g.work_item for g in (*report.dropped, *report.told)])
    working = select(Node).where(Node.job_id == job.id, Node.state == NodeState.ACTIVE)
    active = list(await session.scalars(working))
    session.add(
        Step(
            job_id=job.id, step=report.step, at=now, t_train=report.t_train, t_idle=report.t_idle,
            reward=report.reward, rollouts=rollouts, groups=len(report.trained), dropped=dropped,
            lags={str(k): v for k, v in report.lags.items()}, metrics=report.metrics,
            nodes=len(active), mu_pool=sum(n.mu_measured or 0.0 for n in active),
            spent_micros=found.before + money.total_spent(found.leases, now),
        )
    )  # fmt: skip
    times = select(Step.t_train).where(Step.job_id == job.id).order_by(Step.step.desc()).limit(MOST_STEPS)
    # This step is among them; the rehearsal's time was a guess.
    job.t_train = usual_step(list(await session.scalars(times)))
    job.step, job.reward_train = report.step, report.reward
    job.rollouts_trained += rollouts
    job.train_seconds += report.t_train
    if report.step > 1:
        job.idle_seconds += report.t_idle
        metrics.idle.labels(job.id).observe(report.t_idle)
    metrics.train.labels(job.id).observe(report.t_train)
    metrics.reward.labels(job.id, "train").set(report.reward)
    metrics.learner_step(job.id, report.metrics)
    for lag, number in report.lags.items():
        for _ in range(number):
            metrics.staleness.labels(job.id).observe(lag)
    metrics.bubble_ratio.labels(job.id).set(bubble_ratio(job.idle_seconds, job.train_seconds) or 0.0)


async def evaluated(core: Core, session: AsyncSession, job: Job, report: EvalReport) -> None:
    """The learner's own evaluation of a version. A learner that goes on from a checkpoint may tell one again."""
    known = select(Evaluation).where(Evaluation.job_id == job.id, Evaluation.step == report.step)
    row = (await session.scalars(known)).first()
    again = row is not None and row.by == "learner" and row.reward == report.reward
    if row is None:
        row = Evaluation(job_id=job.id, step=report.step)
        session.add(row)
    row.reward, row.prompts, row.at = report.reward, report.prompts, core.clock()
    if report.final:
        # A newer version may have been evaluated and lost with its checkpoint: the job ends without it.
        job.eval_step = None
    show(core, job, report.step, report.reward)
    if report.initial:
        job.reward_eval_initial = report.reward
    if not again:
        message = f"held-out reward of v{report.step}: {report.reward:.4f} over {report.prompts} prompts"
        core.emit(session, job.id, "evaluated", message)


def show(core: Core, job: Job, step: int, reward: float) -> None:
    """A held-out reward of v_step is known: it is the job's, unless that of a newer version is."""
    if job.eval_step is None or step >= job.eval_step:
        job.reward_eval, job.eval_step = reward, step
        core.metrics.reward.labels(job.id, "eval").set(reward)
