"""Work items: handed out under admission, answered by trajectory files, taken back when a node is too slow or gone.

Invariant: a group is accepted at most once, only from the node that it is leased to, only whole and only if it is
still admissible; what was accepted stays until the learner trained on it or dropped it.
"""

from __future__ import annotations

import logging
import secrets

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import admission, scores
from app.fleet.commits import Commits
from app.fleet.stored import in_store, stored_urls
from app.protocol.errors import NotFound
from app.protocol.job import JobStatus
from app.protocol.node import (
    NodeState,
    SnapshotUrls,
    UploadSlot,
    WorkAnswer,
    WorkRequest,
)
from app.protocol.node import (
    WorkItem as WorkItemMessage,
)
from app.storage.models import ItemStatus, Job, Node, SnapshotRow, Step, WorkItem

log = logging.getLogger(__name__)

UPLOAD_EXPIRES_S = 3600


class Work(Commits):
    """Hands out work and takes results."""

    async def lease(self, node_id: str, request: WorkRequest) -> WorkAnswer:
        """Up to `max_items` groups, waiting up to `wait_s` until admission lets some out."""
        deadline = self.core.clock() + request.wait_s
        job_id = await self._job_of(node_id)
        while True:
            news = self.core.signals.subscribe(f"work:{job_id}")
            answer = await self._try_lease(node_id, request)
            left = deadline - self.core.clock()
            if answer.items or left <= 0:
                return answer
            await self.core.signals.wait(news, min(left, 2.0))

    async def _try_lease(self, node_id: str, request: WorkRequest) -> WorkAnswer:
        # Most waits end empty-handed: look without the write lock first.
        async with self.core.db.read() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            count, reason = await self._grantable(session, job, node, request)
            waiting = await self._exam_waits(session, job, node, request)
        if count == 0 and waiting is None:
            return WorkAnswer(items=[], reason=reason)
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            count, reason = await self._grantable(session, job, node, request)
            exam = await self._take_exam(session, job, node, request, idle=count == 0)
            if exam:
                return WorkAnswer(items=exam, upload=self._slot(job, node_id, request))
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
        return WorkAnswer(items=messages, upload=self._slot(job, node_id, request))

    def _slot(self, job: Job, node_id: str, request: WorkRequest) -> UploadSlot:
        key = f"jobs/{job.id}/trajectories/{request.policy_version}/{node_id}-{secrets.token_hex(8)}.parquet"
        put = self.core.objects.presign_put(key, UPLOAD_EXPIRES_S, self.core.settings.max_upload_bytes)
        return UploadSlot(key=key, url=put.url, headers=put.headers)

    @staticmethod
    def _share(job: Job, node: Node) -> int:
        batch = job.spec["batch"]
        return admission.share(
            t_train=job.t_train, group_size=batch["group_size"], prompts=batch["prompts"], node_rate=node.mu_measured
        )

    async def _exam_waits(self, session: AsyncSession, job: Job, node: Node, request: WorkRequest) -> float | None:
        """How long held-out prompts have waited that this node may answer; None if there are none."""
        going = job.status in (JobStatus.PROVISIONING, JobStatus.RUNNING)
        fit = going and not node.drain and node.state in (NodeState.WARMING, NodeState.ACTIVE)
        return await self.exams.waiting(session, job, request.policy_version) if fit else None

    async def _grantable(self, session: AsyncSession, job: Job, node: Node, request: WorkRequest) -> tuple[int, str]:
        """How many groups this node may have now, and why not more."""
        if job.status not in (JobStatus.PROVISIONING, JobStatus.RUNNING):
            return 0, f"the job is {job.status}"
        if node.drain or node.state in (NodeState.DRAINING, NodeState.LOST, NodeState.GONE):
            return 0, "this node drains"
        if job.published_version is None or request.policy_version > job.published_version:
            return 0, f"version {request.policy_version} is not published"
        ahead = await session.scalar(
            select(func.count())
            .select_from(WorkItem)
            .where(WorkItem.job_id == job.id, WorkItem.status.in_([ItemStatus.LEASED, ItemStatus.ACCEPTED]))
        )
        count = admission.grantable(
            step=job.step,
            version=request.policy_version,
            staleness=job.staleness_budget,
            prompts=await self._consumed(session, job),
            ahead=ahead or 0,
        )
        if count == 0:
            return (
                0,
                f"admission: {ahead} groups are ahead at step {job.step}; "
                f"more under v{request.policy_version} would be stale",
            )
        return min(count, self._share(job, node), request.max_items), ""

    @staticmethod
    async def _consumed(session: AsyncSession, job: Job) -> int:
        batch, learner = job.spec["batch"], job.spec["learner"]
        prompts = int(batch["prompts"])
        if not learner.get("refill", False):
            return prompts
        query = select(Step.rollouts).where(Step.job_id == job.id).order_by(Step.step.desc()).limit(admission.LOOK)
        recent = [rollouts // batch["group_size"] for rollouts in await session.scalars(query)]
        return admission.consumed(recent, prompts=prompts, most=int(prompts * learner["refill_factor"]))

    async def _take_exam(
        self, session: AsyncSession, job: Job, node: Node, request: WorkRequest, *, idle: bool
    ) -> list[WorkItemMessage]:
        """Held-out prompts, when the node would be idle otherwise or when they have waited for long."""
        waiting = await self._exam_waits(session, job, node, request)
        period_s = (job.t_train or 1.0) * job.publish_period
        if waiting is None or not (idle or scores.goes_first(waiting, period_s)):
            return []
        share = min(request.max_items, self._share(job, node))
        return await self.exams.take(session, job, node, request.policy_version, share)

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
        seed, size = int(job.spec["seed"]), job.train_prompts or 1
        for ordinal in range(job.next_ordinal, job.next_ordinal + count - len(pending)):
            item = WorkItem(
                id=f"{job.id}-{ordinal}",
                job_id=job.id,
                ordinal=ordinal,
                prompt_index=admission.prompt_at(seed, ordinal, size),
                seed=admission.item_seed(seed, ordinal),
                status=ItemStatus.PENDING,
                attempts=0,
            )
            session.add(item)
            pending.append(item)
            job.next_ordinal = ordinal + 1
        batch = job.spec["batch"]
        rate = node.mu_measured / batch["group_size"] if node.mu_measured else None
        seconds = admission.lease_deadline(
            t_train=job.t_train, prompts=batch["prompts"], items=len(pending), node_rate_groups_s=rate
        )
        if batch.get("group_deadline_s") is not None and batch.get("on_late") == "reissue":
            seconds = min(seconds, batch["group_deadline_s"])
        for item in pending:
            item.status, item.node_id, item.leased_version = ItemStatus.LEASED, node.id, version
            item.deadline_at = self.core.clock() + seconds
            item.attempts += 1
        return pending

    async def expire(self, session: AsyncSession, job: Job) -> int:
        """Leases past their deadline: the work is pending again. Returns how many groups."""
        await self.exams.expire(session, job)
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
            stored = await in_store(session, node.job_id, up_to=version)
        if row is None or not (row.stored or row.delta_stored):
            raise NotFound(f"version {version} is not in the object store")
        return stored_urls(lambda key: self.core.objects.presign_get(key, UPLOAD_EXPIRES_S), row, stored, first, count)
