"""The index of trajectories, page by page.

Invariant: a file is listed as long as a group in it is still to be trained on, and only with those groups.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.protocol.learner import TrajectoryPage, TrajectoryRef
from app.storage.models import ItemStatus, Job, Trajectory, WorkItem

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
                Trajectory.seq.in_(select(WorkItem.trajectory_seq).where(accepted)),
            )
            .order_by(Trajectory.seq)
            .limit(PAGE)
        )
    )
    groups: dict[int, list[str]] = {}
    query = select(WorkItem.trajectory_seq, WorkItem.id).where(
        accepted, WorkItem.trajectory_seq.in_([f.seq for f in files])
    )
    for seq, item in (await session.execute(query)).tuples():
        groups.setdefault(seq or 0, []).append(item)
    items = [
        TrajectoryRef(
            seq=f.seq, key=f.key, size=f.size, blake3=f.blake3, node_id=f.node_id, work_items=sorted(groups[f.seq])
        )
        for f in files
    ]
    return TrajectoryPage(items=items, cursor=files[-1].seq if files else after)
