"""What became of groups: trained on at a step, dropped with a reason, or to be trained on again.

Invariant: a group counts once, as trained or as dropped; a learner that goes back to a checkpoint is told the groups of
every later step in their order, also when it goes back several times before it has caught up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import prompts
from app.fleet.core import Core
from app.fleet.sizes import size_of
from app.protocol.learner import DroppedGroup, ReplayStep
from app.storage.models import ItemStatus, Job, Node, Step, Trajectory, WorkItem

_BLOCK = 500
"""Work items in one query: databases bound the number of parameters."""


async def mark_trained(session: AsyncSession, job: Job, step: int, items: Sequence[str]) -> None:
    """The groups that a step was made from, each with its place in the batch."""
    places = {item: place for place, item in enumerate(items)}
    for start in range(0, len(items), _BLOCK):
        wanted = select(WorkItem).where(
            WorkItem.job_id == job.id,
            WorkItem.id.in_(items[start : start + _BLOCK]),
            # One that was withdrawn from a liar while the learner was in the step is trained on all the same, also if
            # another node is at it by now: what that one brings comes too late.
            (WorkItem.status == ItemStatus.ACCEPTED)
            | (WorkItem.status.in_([ItemStatus.PENDING, ItemStatus.LEASED]) & WorkItem.trajectory_seq.is_not(None)),
        )
        for item in await session.scalars(wanted):
            if item.status != ItemStatus.ACCEPTED:
                job.rollouts_accepted += size_of(job, item)
                item.node_id = item.deadline_at = None
            item.status, item.trained_step, item.replay_step = ItemStatus.TRAINED, step, None
            item.trained_position = places[item.id]


async def mark_dropped(core: Core, session: AsyncSession, job: Job, dropped: Iterable[DroppedGroup]) -> int:
    """Groups that will never be trained on; returns how many were not known as such."""
    count = 0
    for group in dropped:
        item = await session.get(WorkItem, group.work_item)
        if item is not None and item.job_id == job.id and item.status == ItemStatus.ACCEPTED:
            drop(core, job, item, group.reason, lag=group.lag)
            count += 1
    return count


def drop(core: Core, job: Job, item: WorkItem, reason: str, *, lag: int | None) -> None:
    """One group: never trained on, counted by reason and, if it is known, by age."""
    item.status, item.drop_reason, item.drop_lag, item.deadline_at = ItemStatus.DROPPED, reason, lag, None
    group_size = size_of(job, item)
    job.rollouts_dropped += group_size
    core.metrics.dropped.labels(job.id, reason).inc(group_size)
    if lag is not None:
        for _ in range(group_size):
            core.metrics.dropped_age.labels(job.id, reason).observe(lag)


async def rewind(session: AsyncSession, job: Job, resume_step: int) -> int:
    """Forget steps after the checkpoint: what they consumed is accepted again. Returns the number of groups.

    But for those of nodes that were put into quarantine since: the learner takes nothing of theirs, and would wait.
    """
    if resume_step >= job.step:
        return 0
    result = await session.execute(
        update(WorkItem)
        .where(WorkItem.job_id == job.id, WorkItem.trained_step > resume_step)
        .values(status=ItemStatus.ACCEPTED, replay_step=WorkItem.trained_step, trained_step=None)
    )
    lost = list(await session.scalars(select(Step).where(Step.job_id == job.id, Step.step > resume_step)))
    job.rollouts_trained -= sum(s.rollouts for s in lost)
    await session.execute(delete(Step).where(Step.job_id == job.id, Step.step > resume_step))
    job.step = resume_step
    return int(getattr(result, "rowcount", 0)) - await _withdraw(session, job)


async def _withdraw(session: AsyncSession, job: Job) -> int:
    """Accepted groups of nodes in quarantine are to be answered anew; how many there were."""
    liars = select(Node.id).where(Node.job_id == job.id, Node.quarantined_at.is_not(None))
    theirs = select(Trajectory.seq).where(Trajectory.job_id == job.id, Trajectory.node_id.in_(liars))
    accepted = (WorkItem.job_id == job.id) & (WorkItem.status == ItemStatus.ACCEPTED)
    items = list(await session.scalars(select(WorkItem).where(accepted, WorkItem.trajectory_seq.in_(theirs))))
    for item in items:
        item.status, item.node_id, item.version = ItemStatus.PENDING, None, None
        item.trajectory_seq = item.replay_step = None
        job.rollouts_accepted -= size_of(job, item)
    await prompts.forget(session, job, [item.prompt_index for item in items])
    return len(items)


async def plan(session: AsyncSession, job: Job) -> list[ReplayStep]:
    """The steps that were made before, from the next one up to the first that is not known whole."""
    query = (
        select(WorkItem.replay_step, WorkItem.id, WorkItem.trained_position)
        .where(WorkItem.job_id == job.id, WorkItem.status == ItemStatus.ACCEPTED, WorkItem.replay_step > job.step)
        .order_by(WorkItem.replay_step, WorkItem.trained_position)
    )
    found: dict[int, list[tuple[int, str]]] = {}
    for step, item, place in (await session.execute(query)).tuples():
        found.setdefault(step or 0, []).append((-1 if place is None else place, item))
    return [ReplayStep(step=s, work_items=items) for s, items in without_gap(job.step, found)]


def without_gap(step: int, found: dict[int, list[tuple[int, str]]]) -> list[tuple[int, list[str]]]:
    """Steps after `step`, as long as each follows the last and has every place from 0 on. Pure."""
    whole: list[tuple[int, list[str]]] = []
    while (groups := found.get(step + 1 + len(whole))) is not None:
        if [place for place, _ in groups] != list(range(len(groups))):
            break
        whole.append((step + 1 + len(whole), [item for _, item in groups]))
    return whole


async def dropped_counts(session: AsyncSession, job_id: str) -> list[dict[str, object]]:
    """Groups that were dropped, by reason and age in versions, for the API."""
    query = (
        select(WorkItem.drop_reason, WorkItem.drop_lag, func.count())
        .where(WorkItem.job_id == job_id, WorkItem.status == ItemStatus.DROPPED)
        .group_by(WorkItem.drop_reason, WorkItem.drop_lag)
        .order_by(WorkItem.drop_reason, WorkItem.drop_lag)
    )
    rows = (await session.execute(query)).tuples()
    return [{"reason": reason or "", "lag": lag, "groups": count} for reason, lag, count in rows]
