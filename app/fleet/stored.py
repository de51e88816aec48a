"""Snapshots in the object store: what is there, where, and what may go.

Invariant: what a live node has, is fetching, or could be sent to next is kept: the newest `KEEP` versions, those that
live nodes have, all between, and the whole version that all of them can be reached from. What is older goes, also what
an earlier sweep came no further with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.core import Core
from app.fleet.roster import LIVE
from app.protocol.job import FINAL_STATUSES
from app.protocol.node import DeltaUrls, SnapshotUrls, StoredPart
from app.storage.models import Job, Node, SnapshotRow

log = logging.getLogger(__name__)
KEEP = 3


def removable(stored: Sequence[int], in_use: Iterable[int | None], whole: Iterable[int] | None = None) -> list[int]:
    """Of the stored versions those that may go. Pure.

    They are older than the newest KEEP, than any that a live node has, and than the newest version that is stored whole
    (`whole`, by default all) and is older than these: from it the deltas lead to all others.
    """
    before = oldest_kept(stored, in_use, stored if whole is None else whole)
    return [v for v in sorted(stored) if v < before]


def oldest_kept(stored: Sequence[int], in_use: Iterable[int | None], whole: Iterable[int]) -> int:
    """The version below which nothing is needed. Pure."""
    newest = sorted(stored)[-KEEP:]
    needed = min([*newest, *(v for v in in_use if v is not None)], default=0)
    return max((v for v in whole if v <= needed), default=0)


def stored_urls(
    sign: Callable[[str], str], row: SnapshotRow, parts: list[StoredPart], first: int, count: int
) -> SnapshotUrls:
    """Presigned GETs of a version, of its delta, or of both, with chunks `first` … `first + count` of each."""
    base = f"jobs/{row.job_id}/snapshots/{row.version}"

    def chunks(place: str, there: int) -> dict[int, str]:
        return {n: sign(f"{place}/chunks/{n}") for n in range(max(0, first), min(there, first + count))}

    delta = None
    if row.delta_stored:
        delta = DeltaUrls(
            manifest_url=sign(f"{base}/delta/manifest.json"),
            version_url=sign(f"{base}/delta/version.json"),
            chunk_urls=chunks(f"{base}/delta", row.delta_chunks or 0),
        )
    return SnapshotUrls(
        version=row.version,
        manifest_url=sign(f"{base}/manifest.json") if row.stored else "",
        chunk_urls=chunks(base, row.chunks) if row.stored else {},
        delta=delta,
        parts=parts,
    )


async def in_store(session: AsyncSession, job_id: str, up_to: int) -> list[StoredPart]:
    """What a job has in the object store, of versions up to a given one."""
    rows = await session.scalars(
        select(SnapshotRow).where(
            SnapshotRow.job_id == job_id,
            SnapshotRow.version <= up_to,
            or_(SnapshotRow.stored.is_(True), SnapshotRow.delta_stored.is_(True)),
        )
    )
    parts: list[StoredPart] = []
    for row in rows:
        if row.stored:
            parts.append(StoredPart(version=row.version, base=None, bytes=row.bytes))
        if row.delta_stored and row.delta_base is not None:
            parts.append(StoredPart(version=row.version, base=row.delta_base, bytes=row.delta_bytes or 0))
    return parts


class StoredSnapshots:
    """Removes what no node needs."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._clean: set[str] = set()
        """Jobs of which nothing lies in the store that this process has not seen removed."""

    async def collect(self) -> None:
        """One sweep over the jobs that are not over."""
        async with self.core.db.read() as session:
            jobs = list(await session.scalars(select(Job.id).where(Job.status.not_in(list(FINAL_STATUSES)))))
        for job_id in jobs:
            await self._collect(job_id)

    async def _collect(self, job_id: str) -> None:
        async with self.core.db.read() as session:
            rows = list(
                await session.scalars(
                    select(SnapshotRow).where(
                        SnapshotRow.job_id == job_id,
                        or_(SnapshotRow.stored.is_(True), SnapshotRow.delta_stored.is_(True)),
                    )
                )
            )
            used = list(
                await session.scalars(select(Node.policy_version).where(Node.job_id == job_id, Node.state.in_(LIVE)))
            )
        stored, whole = [r.version for r in rows], [r.version for r in rows if r.stored]
        before, gone = oldest_kept(stored, used, whole), removable(stored, used, whole)
        if not before or (not gone and job_id in self._clean):
            return
        self._clean.discard(job_id)
        # First nobody is sent there any more, then the bytes go.
        async with self.core.db.write() as session:
            for version in gone:
                row = await session.get_one(SnapshotRow, (job_id, version))
                row.stored = row.delta_stored = False
        for version in await asyncio.to_thread(self._there, job_id, before):
            await asyncio.to_thread(self._remove, f"jobs/{job_id}/snapshots/{version}/")
        self._clean.add(job_id)

    def _there(self, job_id: str, before: int) -> list[int]:
        """Versions below `before` of which anything is in the store."""
        base = f"jobs/{job_id}/snapshots/"
        names = {item.key[len(base) :].partition("/")[0] for item in self.core.objects.list(base)}
        return sorted(v for v in (int(name) for name in names if name.isdecimal()) if v < before)

    def _remove(self, prefix: str) -> None:
        # The manifests first: without them nobody takes the rest for something whole.
        for manifest in ("manifest.json", "delta/manifest.json"):
            self.core.objects.delete(prefix + manifest)
        for item in list(self.core.objects.list(prefix)):
            self.core.objects.delete(item.key)
