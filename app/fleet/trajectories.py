"""The index of trajectories, page by page.

Invariant: a file is listed as long as a group in it is still to be trained on, or an answer in it to a held-out prompt
to be computed again, and only with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import heldout, quarantine
from app.protocol.learner import TrajectoryPage, TrajectoryRef
from app.storage.models import ExamItem, ItemStatus, Job, Trajectory, WorkItem

PAGE = 64


async def page(session: AsyncSession, job: Job, after: int) -> TrajectoryPage:
    """Files with a number above `after`, oldest first, PAGE at most, each with its groups still to train on."""
    accepted = (WorkItem.job_id == job.id) & (WorkItem.status == ItemStatus.ACCEPTED)
    # Only files that still have something: a learner that starts anew must not page through the job's whole past.
    files = list(
        await session.scalars(
            select(Trajectory)
            .where(
                Trajectory.job_id == job.id,
                Trajectory.seq > after,
                Trajectory.seq.in_(select(WorkItem.trajectory_seq).where(accepted))
                | Trajectory.seq.in_(select(ExamItem.trajectory_seq).where(ExamItem.job_id == job.id)),
            )
            .order_by(Trajectory.seq)
            .limit(PAGE)
        )
    )
    groups: dict[int, list[WorkItem]] = {}
    query = select(WorkItem).where(accepted, WorkItem.trajectory_seq.in_([f.seq for f in files]))
    for item in await session.scalars(query.order_by(WorkItem.ordinal)):
        groups.setdefault(item.trajectory_seq or 0, []).append(item)
    exams = await heldout.waiting(session, job.id, [f.seq for f in files if f.heldout])
    items = [
        TrajectoryRef(
            seq=f.seq, key=f.key, size=f.size, blake3=f.blake3, node_id=f.node_id,
            **(_answers(exams[f.seq]) if f.heldout else _groups(groups[f.seq])),
            **await quarantine.told(session, f.node_id),
        )
        for f in files
        if f.seq in (exams if f.heldout else groups)
    ]  # fmt: skip
    return TrajectoryPage(
        items=items, cursor=files[-1].seq if files else after, quarantined=await quarantine.quarantined(session, job.id)
    )


def _groups(items: Sequence[WorkItem]) -> dict[str, Any]:
    return {
        "work_items": [i.id for i in items],
        "group_sizes": {i.id: i.group_size for i in items if i.group_size is not None},
        "written_by": {i.id: list(i.written_by) for i in items if i.written_by},
    }


def _answers(items: Sequence[ExamItem]) -> dict[str, Any]:
    return {
        "work_items": [i.id for i in items],
        "group_sizes": {i.id: i.samples for i in items},
        "heldout": True,
        "greedy": [i.id for i in items if i.greedy],
    }
