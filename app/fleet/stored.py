"""Old snapshots in the object store.

Invariant: what a live node has, is fetching, or could be sent to next is kept; so are the newest `KEEP` versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from sqlalchemy import select

from app.fleet.core import Core
from app.fleet.roster import LIVE
from app.protocol.job import FINAL_STATUSES
from app.storage.models import Job, Node, SnapshotRow

log = logging.getLogger(__name__)
KEEP = 3


def removable(stored: Sequence[int], in_use: Iterable[int | None]) -> list[int]:
    """Of the stored versions those that may go: older than the newest KEEP and than any that a live node has. Pure."""
    newest = sorted(stored)[-KEEP:]
    oldest_needed = min([*newest, *(v for v in in_use if v is not None)], default=0)
    return [v for v in sorted(stored) if v < oldest_needed]


class StoredSnapshots:
    """Removes what no node needs."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def collect(self) -> None:
        """One sweep over the jobs that are not over."""
        async with self.core.db.read() as session:
            jobs = list(await session.scalars(select(Job.id).where(Job.status.not_in(list(FINAL_STATUSES)))))
        for job_id in jobs:
            await self._collect(job_id)

    async def _collect(self, job_id: str) -> None:
        async with self.core.db.read() as session:
            stored = list(
                await session.scalars(
                    select(SnapshotRow.version).where(SnapshotRow.job_id == job_id, SnapshotRow.stored.is_(True))
                )
            )
            used = list(
                await session.scalars(select(Node.policy_version).where(Node.job_id == job_id, Node.state.in_(LIVE)))
            )
        for version in removable(stored, used):
            # First nobody is sent there any more, then the bytes go.
            async with self.core.db.write() as session:
                (await session.get_one(SnapshotRow, (job_id, version))).stored = False
            await asyncio.to_thread(self._remove, f"jobs/{job_id}/snapshots/{version}/")

    def _remove(self, prefix: str) -> None:
        # The manifest first: without it nobody takes the rest for a whole snapshot.
        self.core.objects.delete(prefix + "manifest.json")
        for item in list(self.core.objects.list(prefix)):
            self.core.objects.delete(item.key)
