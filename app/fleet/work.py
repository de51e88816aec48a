"""Work items: handed out under admission, answered by trajectory files, taken back when a node is too slow or gone.

Invariant: a group is accepted at most once, only from the node that it is leased to, only whole and only if it is
still admissible; what was accepted stays until the learner trained on it or dropped it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

import blake3
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import admission
from app.fleet.core import Core
from app.protocol import trajectory
from app.protocol.errors import Conflict, NotFound, Refused
from app.protocol.job import JobSpec, JobStatus
from app.protocol.node import (
    CommitAnswer,
    CommitRequest,
    NodeState,
    SnapshotUrls,
    UploadSlot,
    WorkAnswer,
    WorkRequest,
)
from app.protocol.node import (
    WorkItem as WorkItemMessage,
)
from app.storage.models import ItemStatus, Job, Node, SnapshotRow, Trajectory, WorkItem

log = logging.getLogger(__name__)

UPLOAD_EXPIRES_S = 3600
PUBLISH_LAG_S = 2.0
"""So long may the learner's word of a version come after the version itself reached a node."""
REFUSED_TOLERATED = 20
"""A node whose files are refused this often in a row is given up by the controller."""


class Work:
    """Hands out work and takes results."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def lease(self, node_id: str, request: WorkRequest) -> WorkAnswer:
        """Up to `max_items` groups, waiting up to `wait_s` until admission lets some out."""
        deadline = self.core.clock() + request.wait_s
        while True:
            job_id = await self._job_of(node_id)
            news = self.core.signals.subscribe(f"job:{job_id}")
            answer = await self._try_lease(node_id, request)
            left = deadline - self.core.clock()
            if answer.items or left <= 0:
                return answer
            await self.core.signals.wait(news, min(left, 2.0))

    async def _job_of(self, node_id: str) -> str:
        async with self.core.db.read() as session:
            return (await session.get_one(Node, node_id)).job_id

    async def _try_lease(self, node_id: str, request: WorkRequest) -> WorkAnswer:
        # Most waits end empty-handed: look without the write lock first.
        async with self.core.db.read() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            count, reason = await self._grantable(session, job, node, request)
        if count == 0:
            return WorkAnswer(items=[], reason=reason)
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            count, reason = await self._grantable(session, job, node, request)
            items = await self._take(session, job, node, request.policy_version, count)
            if not items:
                return WorkAnswer(items=[], reason=reason)
            messages = [
                WorkItemMessage(
                    id=item.id,
                    prompt_index=item.prompt_index,
                    group_size=job.spec["batch"]["group_size"],
                    seed=item.seed,
                    deadline_s=(item.deadline_at or 0.0) - self.core.clock(),
                )
                for item in items
            ]
        key = f"jobs/{job.id}/trajectories/{request.policy_version}/{node_id}-{secrets.token_hex(8)}.parquet"
        put = self.core.objects.presign_put(key, UPLOAD_EXPIRES_S, self.core.settings.max_upload_bytes)
        return WorkAnswer(items=messages, upload=UploadSlot(key=key, url=put.url, headers=put.headers))

    async def _grantable(self, session: AsyncSession, job: Job, node: Node, request: WorkRequest) -> tuple[int, str]:
        """How many groups this node may have now, and why not more."""
        if job.status not in (JobStatus.PROVISIONING, JobStatus.RUNNING):
            return 0, f"the job is {job.status}"
        if node.drain or node.state in (NodeState.DRAINING, NodeState.LOST, NodeState.GONE):
            return 0, "this node drains"
        if job.published_version is None or request.policy_version > job.published_version:
            return 0, f"version {request.policy_version} is not published"
        spec = JobSpec.model_validate(job.spec)
        ahead = await session.scalar(
            select(func.count())
            .select_from(WorkItem)
            .where(WorkItem.job_id == job.id, WorkItem.status.in_([ItemStatus.LEASED, ItemStatus.ACCEPTED]))
        )
        count = admission.grantable(
            step=job.step,
            version=request.policy_version,
            staleness=job.staleness_budget,
            prompts=spec.batch.prompts,
            ahead=ahead or 0,
        )
        if count == 0:
            return (
                0,
                f"admission: {ahead} groups are ahead at step {job.step}; "
                f"more under v{request.policy_version} would be stale",
            )
        share = admission.share(
            t_train=job.t_train,
            group_size=spec.batch.group_size,
            prompts=spec.batch.prompts,
            node_rate=node.mu_measured,
        )
        return min(count, share, request.max_items), ""

    async def _take(self, session: AsyncSession, job: Job, node: Node, version: int, count: int) -> list[WorkItem]:
        """Items that came back first, then new ones in the seeded order."""
        if count <= 0:
            return []
        pending = list(
            await session.scalars(
                select(WorkItem)
                .where(WorkItem.job_id == job.id, WorkItem.status == ItemStatus.PENDING)
                .order_by(WorkItem.ordinal)
                .limit(count)
            )
        )
        spec, size = JobSpec.model_validate(job.spec), job.train_prompts or 1
        for ordinal in range(job.next_ordinal, job.next_ordinal + count - len(pending)):
            item = WorkItem(
                id=f"{job.id}-{ordinal}",
                job_id=job.id,
                ordinal=ordinal,
                prompt_index=admission.prompt_at(spec.seed, ordinal, size),
                seed=admission.item_seed(spec.seed, ordinal),
                status=ItemStatus.PENDING,
                attempts=0,
            )
            session.add(item)
            pending.append(item)
            job.next_ordinal = ordinal + 1
        rate = node.mu_measured / spec.batch.group_size if node.mu_measured else None
        seconds = admission.lease_deadline(
            t_train=job.t_train, prompts=spec.batch.prompts, items=len(pending), node_rate_groups_s=rate
        )
        for item in pending:
            item.status, item.node_id, item.leased_version = ItemStatus.LEASED, node.id, version
            item.deadline_at = self.core.clock() + seconds
            item.attempts += 1
        return pending

    async def commit(self, node_id: str, request: CommitRequest) -> CommitAnswer:
        """Validate a file that was put and accept its groups. Raises Refused with the reason, counted on the node."""
        try:
            answer = await self._commit(node_id, request)
        except Refused as refusal:
            await self._count_refusal(node_id, request, refusal)
            raise
        if answer.accepted:
            self.core.announce(await self._job_of(node_id))
        return answer

    async def _commit(self, node_id: str, request: CommitRequest) -> CommitAnswer:
        async with self.core.db.read() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            again = (await session.scalars(select(Trajectory).where(Trajectory.key == request.key))).first()
            items = list(await session.scalars(select(WorkItem).where(WorkItem.id.in_(request.work_items))))
        if again is not None:
            if again.node_id != node_id or again.blake3 != request.blake3:
                raise Conflict("another file was committed under this key")
            return CommitAnswer(accepted=[i.id for i in items if i.trajectory_seq == again.seq])
        mine = f"/{node_id}-"
        if not request.key.startswith(f"jobs/{job.id}/trajectories/") or mine not in request.key:
            raise Refused("foreign_key", "this key was not given to this node")
        spec = JobSpec.model_validate(job.spec)
        expected = self._expected(node_id, items, request, spec.batch.group_size)
        versions = await self._checked(request, expected, job, spec.sampling.max_tokens)
        return await self._accept(node_id, request, versions, spec)

    async def _checked(
        self, request: CommitRequest, expected: dict[str, trajectory.Expected], job: Job, max_tokens: int
    ) -> dict[str, int]:
        """The file's oldest versions by work item.

        A node has a version from its relay before the learner's word of it must be here: a file from a version that is
        not published yet waits for that for a moment.
        """
        give_up = asyncio.get_running_loop().time() + PUBLISH_LAG_S
        while True:
            news = self.core.signals.subscribe(f"job:{job.id}")
            async with self.core.db.read() as session:
                newest = await session.scalar(select(Job.published_version).where(Job.id == job.id))
            try:
                return await asyncio.to_thread(self._check_file, request, expected, newest or 0, max_tokens)
            except Refused as refusal:
                left = give_up - asyncio.get_running_loop().time()
                if refusal.reason != "future_version" or left <= 0:
                    raise
            await self.core.signals.wait(news, min(left, 1.0))

    @staticmethod
    def _expected(
        node_id: str, items: Sequence[WorkItem], request: CommitRequest, group_size: int
    ) -> dict[str, trajectory.Expected]:
        """The items that the file must hold. One that is not, or no longer, this node's is refused by name."""
        found = {item.id: item for item in items}
        expected: dict[str, trajectory.Expected] = {}
        for wanted in request.work_items:
            item = found.get(wanted)
            if item is None or item.node_id != node_id or item.status != ItemStatus.LEASED:
                raise Refused("foreign_work_item", f"work item {wanted} is not leased to this node")
            expected[wanted] = trajectory.Expected(item.prompt_index, group_size)
        return expected

    def _check_file(
        self, request: CommitRequest, expected: dict[str, trajectory.Expected], newest: int, max_tokens: int
    ) -> dict[str, int]:
        """Read and check the file in a thread. Returns the oldest version by work item."""
        if request.size > self.core.settings.max_upload_bytes:
            raise Refused("too_large", f"at most {self.core.settings.max_upload_bytes} bytes are accepted")
        info = self.core.objects.head(request.key)
        if info is None:
            raise Refused("missing", "there is no such object in the store")
        if info.size != request.size:
            raise Refused("truncated", f"the object has {info.size} bytes, not {request.size}")
        data = self.core.objects.get(request.key)
        if blake3.blake3(data).hexdigest() != request.blake3:
            raise Refused("hash", "the object's hash is not the committed one")
        rows = sum(e.group_size for e in expected.values())
        table = trajectory.read_table(data, max_rows=rows)
        trajectory.validate(table, expected, newest_version=newest, max_tokens=max_tokens)
        return trajectory.oldest_versions(table)

    async def _accept(
        self, node_id: str, request: CommitRequest, versions: dict[str, int], spec: JobSpec
    ) -> CommitAnswer:
        accepted: list[str] = []
        late: list[str] = []
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            row = Trajectory(
                job_id=job.id, node_id=node_id, key=request.key, size=request.size, blake3=request.blake3,
                rollouts=len(versions) * spec.batch.group_size, created_at=self.core.clock(),
            )  # fmt: skip
            session.add(row)
            await session.flush()
            for item in await session.scalars(select(WorkItem).where(WorkItem.id.in_(list(versions)))):
                if item.node_id != node_id or item.status != ItemStatus.LEASED:
                    late.append(item.id)
                elif job.step - versions[item.id] > job.staleness_budget:
                    late.append(item.id)
                    self._drop(job, item, "stale", spec.batch.group_size)
                else:
                    accepted.append(item.id)
                    item.status, item.trajectory_seq = ItemStatus.ACCEPTED, row.seq
                    item.version, item.deadline_at = versions[item.id], None
            rollouts = len(accepted) * spec.batch.group_size
            job.rollouts_accepted += rollouts
            node.rollouts_accepted += rollouts
            node.files_refused = 0
            self.core.metrics.accepted.labels(job.id).inc(rollouts)
        return CommitAnswer(accepted=accepted, late=late)

    def _drop(self, job: Job, item: WorkItem, reason: str, group_size: int) -> None:
        item.status, item.drop_reason, item.deadline_at = ItemStatus.DROPPED, reason, None
        job.rollouts_dropped += group_size
        self.core.metrics.dropped.labels(job.id, reason).inc(group_size)

    async def _count_refusal(self, node_id: str, request: CommitRequest, refusal: Refused) -> None:
        """A refused file: its items are pending again, the refusal is counted and told."""
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            node.files_refused += 1
            items = await session.scalars(
                select(WorkItem).where(
                    WorkItem.id.in_(request.work_items),
                    WorkItem.node_id == node_id,
                    WorkItem.status == ItemStatus.LEASED,
                )
            )
            for item in items:
                item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
            self.core.emit(
                session, node.job_id, "trajectory_refused", f"{refusal.reason}: {refusal.detail}",
                node=node_id, key=request.key,
            )  # fmt: skip
            self.core.metrics.refused.labels(node.job_id, refusal.reason).inc()
        self.core.announce(node.job_id)

    async def expire(self, session: AsyncSession, job: Job) -> int:
        """Leases past their deadline: the work is pending again. Returns how many."""
        items = list(
            await session.scalars(
                select(WorkItem).where(
                    WorkItem.job_id == job.id,
                    WorkItem.status == ItemStatus.LEASED,
                    WorkItem.deadline_at < self.core.clock(),
                )
            )
        )
        for item in items:
            item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
        if items:
            self.core.emit(
                session, job.id, "work_expired", f"{len(items)} work items passed their deadline and are leased again"
            )
        return len(items)

    async def snapshot_urls(self, node_id: str, version: int, first: int, count: int) -> SnapshotUrls:
        """Presigned GETs of a stored version. Raises NotFound while it is not in the store."""
        async with self.core.db.read() as session:
            node = await session.get_one(Node, node_id)
            row = await session.get(SnapshotRow, (node.job_id, version))
        if row is None or not row.stored:
            raise NotFound(f"version {version} is not in the object store")
        base = f"jobs/{node.job_id}/snapshots/{version}"
        last = min(row.chunks, first + count)
        sign = self.core.objects.presign_get
        return SnapshotUrls(
            version=version,
            manifest_url=sign(f"{base}/manifest.json", UPLOAD_EXPIRES_S),
            chunk_urls={n: sign(f"{base}/chunks/{n}", UPLOAD_EXPIRES_S) for n in range(max(0, first), last)},
        )
