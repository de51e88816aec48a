"""When a version is with every node, and how long that took.

Invariant: T_bcast is of nodes that were at work when a version came out and still are: neither a machine that died on
the way nor one that was rented later makes a broadcast look slow.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.core import Core
from app.fleet.estimates import smooth, weight
from app.protocol.node import NodeState
from app.storage.models import Job, Node, SnapshotRow

KEPT = 4
"""Versions whose arrival is remembered of a node: the next one may come before the last node has this one."""


async def settle(core: Core, session: AsyncSession, job: Job) -> int | None:
    """If every active node has a version, its broadcast (and that of older ones) is over; the newest of those that are
    over now."""
    open_ = select(SnapshotRow).where(SnapshotRow.job_id == job.id, SnapshotRow.completed_at.is_(None))
    rows = list(await session.scalars(open_.order_by(SnapshotRow.version)))
    if not rows:
        return None
    active = list(await session.scalars(select(Node).where(Node.job_id == job.id, Node.state == NodeState.ACTIVE)))
    versions = [n.policy_version for n in active if n.policy_version is not None]
    if not versions or len(versions) < len(active):
        return None
    over = [row for row in rows if row.version <= min(versions)]
    for row in over:
        row.completed_at = core.clock()
    if not over:
        return None
    # Older ones were overtaken: when the nodes would have had them is not known.
    seconds = over[-1].broadcast_s = broadcast_s(over[-1], active)
    if seconds is not None:
        job.t_bcast = smooth(job.t_bcast, seconds, weight(job.t_train or seconds))
        core.metrics.broadcast.labels(job.id).observe(seconds)
    return over[-1].version


def seen(before: Sequence[Sequence[float]], version: int | None, now: float) -> list[list[float]]:
    """`Node.versions_at` after a heartbeat that names a version. An engine that is loaded again with one that the node
    had before is no broadcast."""
    rows = [list(row) for row in before]
    if version is None or (rows and rows[-1][0] >= version):
        return rows
    return [*rows, [version, now]][-KEPT:]


def broadcast_s(row: SnapshotRow, active: Sequence[Node]) -> float | None:
    """Seconds from the publish of a version until the last node had it (or a newer one) that was at work by then and
    still is.

    None where there is none such, and for v0, which waits for the first machines.
    """
    there = [n for n in active if n.state_since <= row.published_at]
    times = [next((at for version, at in n.versions_at if version >= row.version), None) for n in there]
    known = [float(at) for at in times if at is not None]
    if not row.version or not known or len(known) < len(there):
        return None
    return max(0.0, max(known) - row.published_at)
