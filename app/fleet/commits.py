"""Trajectory files: checked, accepted group by group, or refused with a reason.

Invariant: a group is accepted at most once, only from the node that it is leased to, only whole and only while it is
admissible; what was accepted stays until the learner trained on it or dropped it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import blake3
import pyarrow as pa
from sqlalchemy import select

from app.fleet import replay
from app.fleet.core import Core
from app.fleet.exams import Exams, is_exam
from app.fleet.exams import answers as exam_answers
from app.protocol import trajectory
from app.protocol.errors import Conflict, Refused
from app.protocol.job import JobSpec
from app.protocol.node import CommitAnswer, CommitRequest
from app.storage.models import ExamItem, ItemStatus, Job, Node, Trajectory, WorkItem

log = logging.getLogger(__name__)

PUBLISH_LAG_S = 2.0
"""So long may the learner's word of a version come after the version itself reached a node."""
REFUSED_TOLERATED = 20
"""A node whose files are refused this often in a row is given up by the controller."""


class Commits:
    """Takes results."""

    def __init__(self, core: Core, exams: Exams) -> None:
        self.core = core
        self.exams = exams

    async def _job_of(self, node_id: str) -> str:
        async with self.core.db.read() as session:
            return (await session.get_one(Node, node_id)).job_id

    async def commit(self, node_id: str, request: CommitRequest) -> CommitAnswer:
        """Validate a file that was put and accept its groups. Raises Refused with the reason, counted on the node."""
        try:
            answer = await self._commit(node_id, request)
        except Refused as refusal:
            await self._count_refusal(node_id, request, refusal)
            raise
        if answer.accepted:
            self.core.announce(await self._job_of(node_id), "rollouts")
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
        if all(map(is_exam, request.work_items)):
            return await self._commit_exam(node_id, request, job, spec)
        sizes = dict.fromkeys(request.work_items, spec.batch.group_size)
        expected = self._expected(node_id, items, request, sizes)
        table = await self._checked(request, expected, job, spec)
        return await self._accept(node_id, request, trajectory.oldest_versions(table), spec)

    async def _commit_exam(self, node_id: str, request: CommitRequest, job: Job, spec: JobSpec) -> CommitAnswer:
        """Answers to held-out prompts: scored and forgotten; the file is not for the learner."""
        async with self.core.db.read() as session:
            items = list(await session.scalars(select(ExamItem).where(ExamItem.id.in_(request.work_items))))
        expected = self._expected(node_id, items, request, {i.id: i.samples for i in items})
        table = await self._checked(request, expected, job, spec)
        async with self.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job.id))).one()
            taken = await self.exams.accept(session, job, node_id, exam_answers(table))
        await asyncio.to_thread(self.core.objects.delete, request.key)
        self.core.announce(job.id)
        return CommitAnswer(accepted=taken, late=sorted(set(request.work_items) - set(taken)))

    async def _checked(
        self, request: CommitRequest, expected: dict[str, trajectory.Expected], job: Job, spec: JobSpec
    ) -> pa.Table:
        """The file's table, held against what was leased.

        A node has a version from its relay before the learner's word of it must be here: a file from a version that is
        not published yet waits for that for a moment.
        """
        give_up = asyncio.get_running_loop().time() + PUBLISH_LAG_S
        while True:
            news = self.core.signals.subscribe(f"work:{job.id}")
            async with self.core.db.read() as session:
                newest = await session.scalar(select(Job.published_version).where(Job.id == job.id))
            try:
                return await asyncio.to_thread(self._check_file, request, expected, newest or 0, spec)
            except Refused as refusal:
                left = give_up - asyncio.get_running_loop().time()
                if refusal.reason != "future_version" or left <= 0:
                    raise
            await self.core.signals.wait(news, min(left, 1.0))

    @staticmethod
    def _expected(
        node_id: str, items: Sequence[WorkItem] | Sequence[ExamItem], request: CommitRequest, sizes: Mapping[str, int]
    ) -> dict[str, trajectory.Expected]:
        """The items that the file must hold. One that is not, or no longer, this node's is refused by name."""
        found: dict[str, WorkItem | ExamItem] = {item.id: item for item in items}
        expected: dict[str, trajectory.Expected] = {}
        for wanted in request.work_items:
            item = found.get(wanted)
            if item is None or item.node_id != node_id or item.status != ItemStatus.LEASED:
                raise Refused("foreign_work_item", f"work item {wanted} is not leased to this node")
            expected[wanted] = trajectory.Expected(item.prompt_index, sizes[wanted])
        return expected

    def _check_file(
        self, request: CommitRequest, expected: dict[str, trajectory.Expected], newest: int, spec: JobSpec
    ) -> pa.Table:
        """Read and check the file in a thread."""
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
        trajectory.validate(
            table, expected,
            newest_version=newest, max_tokens=spec.sampling.max_tokens, quantised=spec.snapshot.quantise,
        )  # fmt: skip
        return table

    async def _accept(
        self, node_id: str, request: CommitRequest, versions: dict[str, int], spec: JobSpec
    ) -> CommitAnswer:
        accepted: list[str] = []
        late: list[str] = []
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            twin = (await session.scalars(select(Trajectory).where(Trajectory.key == request.key))).first()
            if twin is not None:
                raise Conflict("this file is being committed by another request; send it again")
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
                    lag = job.step - versions[item.id]
                    replay.drop(self.core, job, item, "stale", spec.batch.group_size, lag=lag)
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
            await self.exams.hand_back(session, node_id, request.work_items)
            self.core.emit(
                session, node.job_id, "trajectory_refused", f"{refusal.reason}: {refusal.detail}",
                node=node_id, key=request.key,
            )  # fmt: skip
            self.core.metrics.refused.labels(node.job_id, refusal.reason).inc()
        self.core.announce(node.job_id, "work")
