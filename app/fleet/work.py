"""Work items: handed out under admission, answered by trajectory files, taken back when a node is too slow or gone.

Invariant: a group is accepted at most once, only from the node that it is leased to, only whole and only if it is
still admissible; what was accepted stays until the learner trained on it or dropped it.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import admission, handout, partials, scores, uploads
from app.fleet.core import Core
from app.fleet.exams import Exams
from app.fleet.handback import HandBack, still_here
from app.fleet.sizes import size_of
from app.fleet.stored import in_store, stored_urls
from app.protocol.errors import NotFound
from app.protocol.job import JobStatus
from app.protocol.learner_spec import LearnerSpec
from app.protocol.node import NodeState, SnapshotUrls
from app.protocol.work import WorkAnswer, WorkRequest
from app.protocol.work import WorkItem as WorkItemMessage
from app.storage.models import ItemStatus, Job, Lease, Node, SnapshotRow, Step, WorkItem

log = logging.getLogger(__name__)
MOST_ASKING = 16
"""Requests of one node that may wait for work at a time; further ones are answered at once."""


class Work(HandBack):
    """Hands out work and takes results."""

    def __init__(self, core: Core, exams: Exams, draw: Callable[[], float] | None = None) -> None:
        """`draw` decides what is given to two nodes; by default by numbers that nobody can know."""
        super().__init__(core, exams)
        self._draw = draw or secrets.SystemRandom().random
        self._asking: Counter[str] = Counter()
        """Node → its requests for work that are not answered yet."""

    async def lease(self, node_id: str, request: WorkRequest) -> WorkAnswer:
        """Up to `max_items` groups, waiting up to `wait_s` until admission lets some out."""
        began, got, waits = self.core.clock(), 0, self.core.waits
        self.core.idle.asked(node_id, began)
        try:
            answer = await self._lease(node_id, request)
            got = len(answer.items)
            if got:
                self.core.idle.given(node_id, self.core.clock())
        finally:
            waits.note(node_id, began, self.core.clock(), short=got < request.max_items)
        if waits.due(node_id):
            async with self.core.db.write() as session:
                (await session.get_one(Node, node_id)).waited_s += waits.take(node_id)
        return answer

    async def _lease(self, node_id: str, request: WorkRequest) -> WorkAnswer:
        job_id = await self._job_of(node_id)
        self._asking[node_id] += 1
        try:
            # Each one that waits looks again at every news: a node may not have thousands of them.
            patience = request.wait_s if self._asking[node_id] <= MOST_ASKING else 0.0
            return await self._until_some(node_id, job_id, request, self.core.clock() + patience)
        finally:
            self._asking[node_id] -= 1
            if not self._asking[node_id]:
                del self._asking[node_id]

    async def _until_some(self, node_id: str, job_id: str, request: WorkRequest, deadline: float) -> WorkAnswer:
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
            if why := await self._crowded(session, node):
                return WorkAnswer(items=[], reason=why)
            count, reason, _ = await self._grantable(session, job, node, request)
            waiting = await self._exam_waits(session, job, node, request)
        if count == 0 and waiting is None:
            return WorkAnswer(items=[], reason=reason)
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            count, reason, ahead = await self._grantable(session, job, node, request)
            exam = await self._take_exam(session, job, node, request, idle=count == 0)
            found = handout.HandedOut([], []) if exam else await handout.take(
                self.core, session, job, node,
                version=request.policy_version, count=count, ahead=ahead, draw=self._draw,
            )  # fmt: skip
        await partials.release(self.core, found.spare)
        # URLs are signed after the transaction: whoever signs may have to fetch its credentials anew.
        messages = exam or [self._message(job, item) for item in found.items]
        if not messages:
            return WorkAnswer(items=[], reason=reason or found.reason)
        upload = self._place(job.id, node_id, request.policy_version, [m.id for m in messages])
        return WorkAnswer(items=messages, upload=upload)

    def _message(self, job: Job, item: WorkItem) -> WorkItemMessage:
        return WorkItemMessage(
            id=item.id,
            prompt_index=item.prompt_index,
            group_size=size_of(job, item),
            seed=item.seed,
            deadline_s=(item.deadline_at or 0.0) - self.core.clock(),
            partial=partials.ref(self.core, item),
        )

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

    async def _grantable(
        self, session: AsyncSession, job: Job, node: Node, request: WorkRequest
    ) -> tuple[int, str, int]:
        """How many groups this node may have now, why not more, and how many are ahead of them."""
        if job.status not in (JobStatus.PROVISIONING, JobStatus.RUNNING):
            return 0, f"the job is {job.status}", 0
        if node.drain or node.state in (NodeState.DRAINING, NodeState.LOST, NodeState.GONE):
            return 0, "this node drains", 0
        if job.published_version is None or request.policy_version > job.published_version:
            return 0, f"version {request.policy_version} is not published", 0
        counted = await session.scalar(
            select(func.count())
            .select_from(WorkItem)
            .where(WorkItem.job_id == job.id, WorkItem.status.in_([ItemStatus.LEASED, ItemStatus.ACCEPTED]))
        )
        ahead = counted or 0
        count = admission.grantable(
            step=job.step,
            version=request.policy_version,
            staleness=job.staleness_budget,
            prompts=await self._consumed(session, job),
            ahead=ahead,
        )
        if count == 0:
            return (
                0,
                f"admission: {ahead} groups are ahead at step {job.step}; "
                f"more under v{request.policy_version} would be stale",
                ahead,
            )
        room = await self._room(session, job, node)
        if room == 0:
            return 0, "dispatch: the speed of this node is not known; it gets more when what it has is handed in", ahead
        return min(count, self._share(job, node), request.max_items, count if room is None else room), "", ahead

    async def _room(self, session: AsyncSession, job: Job, node: Node) -> int | None:
        """How many groups more a node may hold that nobody has measured; None for one that was."""
        if node.mu_measured:
            return None
        batch = job.spec["batch"]
        mine = select(WorkItem).where(WorkItem.node_id == node.id, WorkItem.status == ItemStatus.LEASED)
        answers = sum(size_of(job, item) for item in await session.scalars(mine)) + await self.exams.held(session, node)
        lease = await session.get_one(Lease, node.lease_id)
        return admission.unmeasured(
            prior=lease.mu_prior, group_size=batch["group_size"], prompts=batch["prompts"], t_train=job.t_train,
            staleness=job.staleness_budget, held=answers / batch["group_size"],
        )  # fmt: skip

    @staticmethod
    async def _consumed(session: AsyncSession, job: Job) -> int:
        """Groups that the next step will consume at least. Counted in groups: where their sizes vary, a step's rollouts
        over the job's size are more than that when it got many large ones, and what was let out then grew stale."""
        prompts, learner = int(job.spec["batch"]["prompts"]), LearnerSpec.model_validate(job.spec["learner"])
        if not learner.refill:
            return prompts
        query = select(Step.groups).where(Step.job_id == job.id).order_by(Step.step.desc()).limit(admission.LOOK)
        recent = [groups for groups in await session.scalars(query) if groups is not None]
        return admission.consumed(recent, prompts=prompts, most=learner.most_groups(prompts))

    async def _take_exam(
        self, session: AsyncSession, job: Job, node: Node, request: WorkRequest, *, idle: bool
    ) -> list[WorkItemMessage]:
        """Held-out prompts, when the node would be idle otherwise or when they have waited for long."""
        waiting = await self._exam_waits(session, job, node, request)
        if waiting is None or not (idle or await self._exam_first(session, job, waiting)):
            return []
        share = min(request.max_items, self._share(job, node))
        room = await self._room(session, job, node)
        if room == 0:
            return []
        share = share if room is None else min(share, room)
        return await self.exams.take(session, job, node, request.policy_version, share)

    async def _exam_first(self, session: AsyncSession, job: Job, waited_s: float) -> bool:
        under_way = WorkItem.status.in_([ItemStatus.LEASED, ItemStatus.ACCEPTED])
        query = select(WorkItem.status, func.count()).where(WorkItem.job_id == job.id, under_way)
        query = query.group_by(WorkItem.status)
        counts = {status: int(n) for status, n in (await session.execute(query)).tuples()}
        batch = job.spec["batch"]
        return scores.goes_first(
            waited_s, (job.t_train or 1.0) * job.publish_period,
            ready=counts.get(ItemStatus.ACCEPTED, 0), prompts=batch["prompts"],
            answers=await self.exams.under_way(session, job),
            rollouts=counts.get(ItemStatus.LEASED, 0) * int(batch["group_size"]),
        )  # fmt: skip

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
        for holder in {item.node_id for item in items}:
            # Who leases and never delivers keeps work from everybody.
            node = await session.get(Node, holder)
            if node is not None:
                node.files_refused += 1
        for item in items:
            item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
        if items:
            self.core.emit(
                session, job.id, "work_expired", f"{len(items)} work items passed their deadline and are leased again"
            )
        return len(items)

    async def snapshot_urls(self, node_id: str, version: int, first: int, count: int) -> SnapshotUrls:
        """Presigned GETs of a stored version. Raises NotFound while it is not in the store, Gone."""
        async with self.core.db.read() as session:
            node = still_here(await session.get_one(Node, node_id))
            row = await session.get(SnapshotRow, (node.job_id, version))
            stored = await in_store(session, node.job_id, up_to=version)
        if row is None or not (row.stored or row.delta_stored):
            raise NotFound(f"version {version} is not in the object store")
        return stored_urls(lambda key: self.core.objects.presign_get(key, uploads.EXPIRES_S), row, stored, first, count)
