"""Trajectory files in the object store that nobody will read.

Invariant: a file of which nothing was accepted goes once nobody can hand it in any more; one of which something was
goes only if the operator has said how long rollouts are kept, and then only once its groups are trained on or dropped
and lie behind the oldest checkpoint that a learner could go on from, or were all accepted anew from other files.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.core import Core
from app.fleet.roster import LIVE
from app.fleet.uploads import EXPIRES_S
from app.protocol.job import JobSpec, JobStatus, period
from app.storage.models import ItemStatus, Job, Node, SnapshotRow, Trajectory, WorkItem

log = logging.getLogger(__name__)

SETTLED_S = 2.0 * EXPIRES_S
"""A place to put a file is good for half of it; then the file has to be handed in."""
RECENT_S = 7 * 24 * 3600.0
"""Jobs that are over for longer were swept before."""
BLOCK = 500
MOST = 5000
"""Files of a job that one sweep removes."""
OVER = {ItemStatus.TRAINED, ItemStatus.DROPPED}


def behind(spec: JobSpec, staleness_budget: int, keep_steps: int) -> int:
    """How many steps back a group has to lie for its file to go: as many as are kept, and at least two checkpoints that
    would be uploaded, as far apart as they ever are under the S that was asked for or `staleness_budget`. Pure."""
    # κ may be shorter now than when the checkpoints were made that a learner would go on from.
    longest = max(spec.kappa, period(staleness_budget, spec.publish_period))
    between = spec.learner.checkpoint_every or longest
    return max(keep_steps, 2 * between * (spec.learner.checkpoint_upload_every or 1))


def done_before(spec: JobSpec, staleness_budget: int, step: int, stored: Iterable[int], keep_steps: int) -> int:
    """The step up to which no learner trains again: it lies so far `behind`, and no later than what a learner would
    find if the newest of the checkpoints in the store (`stored`, steps) were damaged. Pure."""
    # Beyond those that a job keeps there is only the best one, which may be as old as the job.
    newest = sorted(stored, reverse=True)[: min(2, spec.learner.checkpoint_keep)]
    return min([step - behind(spec, staleness_budget, keep_steps), *newest])


def checkpoint_of(key: str) -> int | None:
    """The step in `jobs/JOB/checkpoints/STEP/COMMIT`, without which a checkpoint is not whole; None for another key.
    Pure."""
    parts = key.split("/")
    marks = len(parts) == 5 and parts[2] == "checkpoints" and parts[4] == "COMMIT"
    return int(parts[3]) if marks and parts[3].isdecimal() else None


def version_of(key: str) -> int | None:
    """The version in `jobs/JOB/trajectories/VERSION/…`; None for another key. Pure."""
    parts = key.split("/")
    return int(parts[3]) if len(parts) == 5 and parts[2] == "trajectories" and parts[3].isdecimal() else None


@dataclass(frozen=True, slots=True)
class Group:
    """What became of a group of a file."""

    status: str
    trained_step: int | None


def done_with(groups: Iterable[Group], before: int | None) -> bool:
    """Whether all groups of an accepted file are over, and trained on at `before` or earlier. None: files are kept.
    Says nothing of a file without a group. Pure."""
    known = list(groups)
    return (
        before is not None and bool(known) and all(g.status in OVER and (g.trained_step or 0) <= before for g in known)
    )


class Litter:
    """Removes them, job by job."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._swept: dict[str, int] = {}
        """Job → the version below which nothing is left to look at."""

    async def collect(self) -> None:
        """One sweep over the jobs that run, and those that ended lately."""
        since = self.core.clock() - RECENT_S
        awake = Job.finished_at.is_(None) | (Job.finished_at > since)
        async with self.core.db.read() as session:
            jobs = list(await session.scalars(select(Job).where(awake).order_by(Job.seq)))
        for job in jobs:
            await self._sweep(job)

    async def _sweep(self, job: Job) -> None:
        async with self.core.db.read() as session:
            end = await self._settled(session, job)
        begin = self._swept.get(job.id)
        if end is None or (begin is not None and begin >= end):
            return
        before = await self._before(job)
        keys = await asyncio.to_thread(self._list, job.id, begin, end)
        left = end
        removed: Counter[str] = Counter()
        for start in range(0, len(keys), BLOCK):
            block = keys[start : start + BLOCK]
            async with self.core.db.read() as session:
                gone, later = await self._judge(session, block, before)
            left = min([left, *(v for key in later if (v := version_of(key)) is not None)])
            for key in gone:
                await asyncio.to_thread(self.core.objects.delete, key)
            removed["files"] += len(gone)
            if removed["files"] >= MOST and start + BLOCK < len(keys):
                left = min(left, version_of(keys[start + BLOCK]) or 0)
                break
        self._swept[job.id] = left
        if removed["files"]:
            log.info("%s: %d files below v%d that nobody will read were removed", job.id, removed["files"], end)

    async def _settled(self, session: AsyncSession, job: Job) -> int | None:
        """The version under which, and under none below, a file can still be handed in; None if that is not known."""
        now = self.core.clock()
        if JobStatus(job.status).final:
            over = job.finished_at is not None and now - job.finished_at > SETTLED_S
            return (job.published_version or 0) + 1 if over else None
        published = SnapshotRow.published_at < now - SETTLED_S
        newest = await session.scalar(
            select(func.max(SnapshotRow.version)).where(SnapshotRow.job_id == job.id, published)
        )
        held = await session.scalar(
            select(func.min(func.coalesce(Node.policy_version, 0))).where(Node.job_id == job.id, Node.state.in_(LIVE))
        )
        bounds = [newest or 0, job.step - job.staleness_budget, *([] if held is None else [held])]
        return min(bounds) if min(bounds) > 0 else None

    async def _before(self, job: Job) -> int | None:
        """The step up to which files of groups that were trained on go; None: all are kept."""
        keep = self.core.settings.keep_trajectory_steps
        if keep is None:
            return None
        stored = await asyncio.to_thread(self._stored, job.id)
        return done_before(JobSpec.model_validate(job.spec), job.staleness_budget, job.step, stored, keep)

    def _stored(self, job_id: str) -> list[int]:
        """Steps of the checkpoints in the store. Blocks."""
        found = (checkpoint_of(item.key) for item in self.core.objects.list(f"jobs/{job_id}/checkpoints/"))
        return [step for step in found if step is not None]

    def _list(self, job_id: str, begin: int | None, end: int) -> list[str]:
        """Keys of the versions from `begin` (None: all) to before `end`. Blocks."""
        base = f"jobs/{job_id}/trajectories/"
        folders = [base] if begin is None else [f"{base}{version}/" for version in range(begin, end)]
        keys = [item.key for folder in folders for item in self.core.objects.list(folder)]
        found = [(v, key) for key in keys if (v := version_of(key)) is not None and v < end]
        return [key for _, key in sorted(found)]

    async def _judge(
        self, session: AsyncSession, keys: Sequence[str], before: int | None
    ) -> tuple[list[str], list[str]]:
        """Of these files those that go now, and those to look at again. `before`: as of `done_with`."""
        # A row without rollouts is of a file that came too late for all its groups: a file's record and what is
        # accepted of it are written in one transaction.
        counts = (Trajectory.rollouts > 0) | Trajectory.heldout.is_(True)
        columns = select(Trajectory.key, Trajectory.seq, Trajectory.heldout)
        rows = (await session.execute(columns.where(Trajectory.key.in_(keys), counts))).tuples().all()
        accepted = {key: seq for key, seq, _ in rows}
        heldout = {key for key, _, heldout in rows if heldout}
        begun = set(await session.scalars(select(WorkItem.partial_key).where(WorkItem.partial_key.in_(keys))))
        groups: Mapping[int, list[Group]] = {}
        if before is not None:
            groups = await self._groups(session, list(accepted.values()))
        gone: list[str] = []
        later: list[str] = []
        for key in keys:
            mine = groups.get(accepted[key], []) if key in accepted else []
            if key in begun or (mine and not done_with(mine, before)):
                later.append(key)
            elif key not in accepted or mine or (before is not None and key not in heldout):
                # One whose groups were all withdrawn and accepted from elsewhere has none that names it.
                gone.append(key)
        return gone, later

    @staticmethod
    async def _groups(session: AsyncSession, files: Sequence[int]) -> dict[int, list[Group]]:
        found: dict[int, list[Group]] = {}
        query = select(WorkItem.trajectory_seq, WorkItem.status, WorkItem.trained_step)
        for seq, status, step in (await session.execute(query.where(WorkItem.trajectory_seq.in_(files)))).tuples():
            found.setdefault(seq or 0, []).append(Group(status, step))
        return found
