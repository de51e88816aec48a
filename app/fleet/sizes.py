"""How many completions a group has.

Invariant: a work item's own size counts where it has one, the job's where it has none; whatever is counted in rollouts
counts completions that were sampled, also those that a node left out of its file (`batch.prune`).
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.storage.models import Job, WorkItem

_BLOCK = 500
"""Work items in one query: databases bound the number of parameters."""


def size_of(job: Job, item: WorkItem) -> int:
    """Completions of a group."""
    return int(job.spec["batch"]["group_size"]) if item.group_size is None else item.group_size


async def rollouts(session: AsyncSession, job: Job, items: Iterable[str]) -> int:
    """Completions of these groups together; one that is not on record counts as the job's size."""
    wanted, usual = list(items), int(job.spec["batch"]["group_size"])
    total = usual * len(wanted)
    if job.spec["batch"].get("group_policy", "uniform") == "uniform":
        return total
    for start in range(0, len(wanted), _BLOCK):
        query = select(WorkItem.group_size).where(
            WorkItem.job_id == job.id, WorkItem.id.in_(wanted[start : start + _BLOCK])
        )
        total += sum(size - usual for size in await session.scalars(query) if size is not None)
    return total
