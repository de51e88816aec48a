"""Completions that were handed in before, under another work item.

Invariant: what is accepted was compared with all that was accepted before it, in the transaction that accepts it. A
group that is answered anew under its own name is not a replay, nor is what chance may well have made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.protocol.copies import Prints, all_of, replayed
from app.protocol.errors import Refused
from app.protocol.job import BatchSpec
from app.storage.models import GroupPrint, Job, WorkItem

_BLOCK = 500
"""Fingerprints in one query: databases bound the number of parameters."""


async def look(
    session: AsyncSession, job: Job, items: Sequence[WorkItem], found: Mapping[str, Prints]
) -> dict[str, str]:
    """Hold groups against what was accepted before, and against each other. Returns what is new of them, fingerprint →
    work item. Raises Refused: `replayed`, or `replayed_begun` if other nodes had begun the group, who may be to blame.
    """
    groups = [(item, found[item.id]) for item in items]
    before = await _known(session, job, {name for _, own in groups for name in own.rare})
    largest = BatchSpec.model_validate(job.spec["batch"]).group_bounds[1]
    fresh: dict[str, str] = {}
    added: Counter[int] = Counter()
    for item, own in groups:
        holders = {name: holder for name in own.rare if (holder := before.get(name) or fresh.get(name)) is not None}
        seen = {name: holder for name, holder in holders.items() if holder != item.id}
        known = added[own.prompt_index] + await _count(session, job, own.prompt_index) if seen else 0
        if replayed(own, seen, known, largest):
            reason = "replayed_begun" if item.written_by else "replayed"
            raise Refused(
                reason,
                f"{len(seen)} completions of work item {item.id} are those that {min(seen.values())} was answered with",
            )
        new = {name: item.id for name in own.rare if name not in holders}
        fresh |= new
        added[own.prompt_index] += len(new)
    return fresh


async def remember(session: AsyncSession, job: Job, fresh: Mapping[str, str]) -> None:
    """Put what `look` found to be new on record."""
    if fresh:
        rows = [{"job_id": job.id, "fingerprint": name, "work_item": item} for name, item in fresh.items()]
        await session.execute(insert(GroupPrint), rows)


async def _known(session: AsyncSession, job: Job, names: Collection[str]) -> dict[str, str]:
    wanted, found = sorted(names), dict[str, str]()
    for start in range(0, len(wanted), _BLOCK):
        query = select(GroupPrint.fingerprint, GroupPrint.work_item).where(
            GroupPrint.job_id == job.id, GroupPrint.fingerprint.in_(wanted[start : start + _BLOCK])
        )
        found.update((await session.execute(query)).tuples().all())
    return found


async def _count(session: AsyncSession, job: Job, prompt_index: int) -> int:
    """How many completions of a prompt are remembered."""
    mine = (GroupPrint.job_id == job.id) & GroupPrint.fingerprint.between(*all_of(prompt_index))
    return await session.scalar(select(func.count()).select_from(GroupPrint).where(mine)) or 0
