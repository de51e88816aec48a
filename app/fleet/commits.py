"""Trajectory files: checked, accepted group by group, or refused with a reason.

Invariant: a group is accepted at most once, only from the node that it is leased to, only whole and only while it is
admissible; what was accepted stays until the learner trained on it or dropped it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import admission, partials, prompts, replay, replays, twins, uploads
from app.fleet.core import Core
from app.fleet.exams import Exams, is_exam
from app.fleet.exams import answers as exam_answers
from app.fleet.sizes import size_of
from app.fleet.trust import CAUGHT
from app.protocol import copies, trajectory
from app.protocol.errors import Conflict, Refused
from app.protocol.job import JobSpec
from app.protocol.node import NodeState
from app.protocol.pruning import kept
from app.protocol.work import CommitAnswer, CommitRequest
from app.storage.models import ExamItem, ItemStatus, Job, Node, Trajectory, WorkItem

log = logging.getLogger(__name__)
T = TypeVar("T")

PUBLISH_LAG_S = 2.0
"""So long may the learner's word of a version come after the version itself reached a node."""
AGAIN = "this file is being committed by another request; send it again"
REFUSED_TOLERATED = 20
"""A node whose files are refused, whose leases run out, or that reports failures this often in a row is given up by the
controller."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a trajectory file showed that was found in order, by work item."""

    versions: Mapping[str, int]
    """Oldest version of any token."""
    prints: Mapping[str, copies.Prints]
    seen: Mapping[str, prompts.Seen]
    scratch: Collection[str]
    """Items that another node had begun and this one sampled anew."""
    answers: Mapping[str, twins.Answer]


class Commits:
    """Takes results."""

    def __init__(self, core: Core, exams: Exams) -> None:
        self.core = core
        self.exams = exams
        self._places = uploads.Places()

    async def _job_of(self, node_id: str) -> str:
        async with self.core.db.read() as session:
            return (await session.get_one(Node, node_id)).job_id

    async def commit(self, node_id: str, request: CommitRequest) -> CommitAnswer:
        """Validate a file that was put and accept its groups. Raises Refused with the reason, counted on the node."""
        try:
            answer = await self._commit(node_id, request)
        except Refused as refusal:
            self._places.used(node_id, request.key, request.work_items)
            await self._count_refusal(node_id, request, refusal)
            raise
        self._places.used(node_id, request.key, [*answer.accepted, *answer.late])
        if answer.accepted:
            self.core.announce(await self._job_of(node_id), "rollouts")
        return answer

    async def _commit(self, node_id: str, request: CommitRequest) -> CommitAnswer:
        async with self.core.db.read() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            again = (await session.scalars(select(Trajectory).where(Trajectory.key == request.key))).first()
            query = select(WorkItem).where(WorkItem.id.in_(request.work_items), WorkItem.job_id == job.id)
            items = list(await session.scalars(query.order_by(WorkItem.ordinal)))
            held = await self.exams.answered(session, node_id, request.work_items)
        if again is not None:
            if again.node_id != node_id or again.blake3 != request.blake3:
                raise Conflict("another file was committed under this key")
            return CommitAnswer(accepted=[i.id for i in items if i.trajectory_seq == again.seq] or held)
        uploads.check_key(request.key, job.id, node_id)
        spec = JobSpec.model_validate(job.spec)
        if held and len(held) == len(request.work_items):
            # The answer to an earlier try was lost.
            await partials.release(self.core, [request.key])
            return CommitAnswer(accepted=held)
        if all(map(is_exam, request.work_items)):
            return await self._commit_exam(node_id, request, job, spec)
        sizes = {i.id: size_of(job, i) for i in items}
        rows = {i: kept(n, spec.batch.prune) for i, n in sizes.items()}
        expected = self._expected(node_id, items, request, sizes, rows)

        def check(newest: int) -> Checked:
            table = self._check_file(request, expected, newest, spec)
            scratch = partials.not_continued(self.core, items, table)
            return Checked(
                trajectory.oldest_versions(table), copies.check(table, sizes), prompts.seen(table), scratch,
                twins.answers(table),
            )  # fmt: skip

        return await self._accept(node_id, request, await self._patiently(job, check), spec)

    async def _commit_exam(self, node_id: str, request: CommitRequest, job: Job, spec: JobSpec) -> CommitAnswer:
        """Answers to held-out prompts: scored and forgotten, but for what the learner is to compute again."""
        async with self.core.db.read() as session:
            query = select(ExamItem).where(ExamItem.id.in_(request.work_items), ExamItem.job_id == job.id)
            items = list(await session.scalars(query))
        if not items and all(name.startswith(f"{job.id}-eval-") for name in request.work_items):
            # The next exam has overtaken theirs: nobody's fault.
            await partials.release(self.core, [request.key])
            return CommitAnswer(accepted=[], late=request.work_items)
        expected = self._expected(node_id, items, request, {i.id: i.samples for i in items})
        step = max(i.step for i in items)

        def check(newest: int) -> dict[str, tuple[int, list[float]]]:
            found = exam_answers(self._check_file(request, expected, newest, spec))
            if min(version for version, _ in found.values()) < step:
                raise Refused("versions", f"an answer to the evaluation of v{step} was sampled under an older version")
            return found

        answers = await self._patiently(job, check)
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == job.id))).one()
            if len(await self.exams.answered(session, node_id, request.work_items)) == len(request.work_items):
                raise Conflict(AGAIN)
            taken, doubted = await self.exams.accept(
                session, job, node, answers, lambda: self._new_file(session, job, node_id, request)
            )
            node.rollouts_delivered += sum(len(answers[name][1]) for name in taken)
            node.files_refused = 0 if taken else node.files_refused
        await partials.release(self.core, [request.key])
        self.core.announce(job.id, *(("rollouts",) if doubted else ()))
        return CommitAnswer(accepted=taken, late=sorted(set(request.work_items) - set(taken)))

    async def _patiently(self, job: Job, check: Callable[[int], T]) -> T:
        """`check`, in a thread, given the newest published version. Raises Refused, Conflict.

        A node has a version from its relay before the learner's word of it must be here: a file from a version that is
        not published yet waits for that for a moment. One that the learner can have reached by now is not refused even
        then, since a service that was away hears of it late: its node has to send it again, for as long as its leases
        run.
        """
        give_up = asyncio.get_running_loop().time() + PUBLISH_LAG_S
        while True:
            news = self.core.signals.subscribe(f"work:{job.id}")
            async with self.core.db.read() as session:
                query = select(Job.published_version, Job.staleness_budget).where(Job.id == job.id)
                newest, staleness = (await session.execute(query)).one()
            try:
                return await asyncio.to_thread(check, newest or 0)
            except Refused as refusal:
                if refusal.reason != "future_version":
                    raise
                if (left := give_up - asyncio.get_running_loop().time()) <= 0:
                    await asyncio.to_thread(check, admission.reach(newest or 0, staleness))
                    raise Conflict(f"{refusal.detail} yet; send the file again") from refusal
            await self.core.signals.wait(news, min(left, 1.0))

    @staticmethod
    def _expected(
        node_id: str,
        items: Sequence[WorkItem] | Sequence[ExamItem],
        request: CommitRequest,
        sizes: Mapping[str, int],
        rows: Mapping[str, int] | None = None,
    ) -> dict[str, trajectory.Expected]:
        """The items that the file must hold. One that is unknown is refused by name, and so is a file of which nothing
        is this node's any more; of others, what is not is late: a lease may end while the file is on its way."""
        found: dict[str, WorkItem | ExamItem] = {item.id: item for item in items}
        theirs = any(item.node_id == node_id and item.status == ItemStatus.LEASED for item in items)
        expected: dict[str, trajectory.Expected] = {}
        for wanted in request.work_items:
            item = found.get(wanted)
            if item is None or not theirs:
                raise Refused("foreign_work_item", f"work item {wanted} is not leased to this node")
            expected[wanted] = trajectory.Expected(
                item.prompt_index, sizes[wanted], None if rows is None else rows[wanted]
            )
        return expected

    def _check_file(
        self, request: CommitRequest, expected: dict[str, trajectory.Expected], newest: int, spec: JobSpec
    ) -> pa.Table:
        """Read and check the file in a thread."""
        rows = sum(e.group_size if e.rows is None else e.rows for e in expected.values())
        table = trajectory.read_table(uploads.fetch(self.core, request), max_rows=rows)
        trajectory.validate(
            table, expected,
            newest_version=newest, max_tokens=spec.sampling.max_tokens, quantised=spec.snapshot.quantise,
            proofs=spec.trust.proofs,
        )  # fmt: skip
        return table

    async def _accept(self, node_id: str, request: CommitRequest, found: Checked, spec: JobSpec) -> CommitAnswer:
        late: list[str] = []
        taken: list[WorkItem] = []
        spare: list[str | None] = []
        own: dict[str, twins.Answer] = {}
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            row = await self._new_file(session, job, node_id, request)
            mine = select(WorkItem).where(WorkItem.id.in_(list(found.versions))).order_by(WorkItem.ordinal)
            for item in await session.scalars(mine):
                lag = job.step - found.versions[item.id]
                if item.node_id != node_id or item.status != ItemStatus.LEASED:
                    late.append(item.id)
                    continue
                spare.append(partials.forget(item, unused=item.id in found.scratch))
                node.rollouts_delivered += size_of(job, item)
                if not item.written_by:
                    own[item.id] = found.answers[item.id]
                if lag > job.staleness_budget:
                    late.append(item.id)
                    replay.drop(self.core, job, item, "stale", lag=lag)
                else:
                    taken.append(item)
                    item.status, item.trajectory_seq = ItemStatus.ACCEPTED, row.seq
                    item.version, item.deadline_at = found.versions[item.id], None
            row.rollouts = rollouts = sum(size_of(job, item) for item in taken)
            await replays.remember(session, job, await replays.look(session, job, taken, found.prints))
            await prompts.note(session, job, [found.seen[i.id] for i in taken], self.core.clock())
            job.rollouts_accepted += rollouts
            node.rollouts_accepted += rollouts
            node.files_refused = 0 if taken else node.files_refused
            self.core.metrics.accepted.labels(job.id).inc(rollouts)
            caught = await twins.note(self.core, session, job, node, own)
        await partials.release(self.core, spare)
        if caught:
            self.core.signals.notify("tick")
        return CommitAnswer(accepted=[i.id for i in taken], late=late)

    async def _new_file(self, session: AsyncSession, job: Job, node_id: str, request: CommitRequest) -> Trajectory:
        """The record of a file. Raises Conflict if there is one, Refused if it was handed in as a beginning."""
        twin = (await session.scalars(select(Trajectory).where(Trajectory.key == request.key))).first()
        if twin is not None:
            raise Conflict(AGAIN)
        if (await session.scalars(select(WorkItem.id).where(WorkItem.partial_key == request.key).limit(1))).first():
            raise Refused("foreign_key", "this file was handed in as the beginning of groups; put the whole ones anew")
        row = Trajectory(
            job_id=job.id, node_id=node_id, key=request.key, size=request.size, blake3=request.blake3,
            rollouts=0, created_at=self.core.clock(),
        )  # fmt: skip
        session.add(row)
        await session.flush()
        return row

    async def _count_refusal(self, node_id: str, request: CommitRequest, refusal: Refused) -> None:
        """A refused file: its items are pending again, the refusal is counted and told."""
        spare: list[str | None] = []
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            self.core.metrics.refused.labels(node.job_id, refusal.reason).inc()
            if node.state in (NodeState.GONE, NodeState.LOST):
                # A file that was on its way when its node left: nothing is to be given back or held against anybody.
                return
            node.files_refused += 1
            if refusal.reason in CAUGHT and node.caught is None:
                node.caught = f"{refusal.reason}: {refusal.detail}"
            items = await session.scalars(
                select(WorkItem).where(
                    WorkItem.id.in_(request.work_items),
                    WorkItem.node_id == node_id,
                    WorkItem.status == ItemStatus.LEASED,
                )
            )
            for item in items:
                item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
                # What it went on from may be why: the next node begins anew.
                spare.append(partials.forget(item, unused=True))
            await self.exams.hand_back(session, node_id, request.work_items)
            self.core.emit(
                session, node.job_id, "trajectory_refused", f"{refusal.reason}: {refusal.detail}",
                node=node_id, key=request.key,
            )  # fmt: skip
        await partials.release(self.core, spare)
        self.core.announce(node.job_id, "work")
        if refusal.reason in CAUGHT:
            self.core.signals.notify("tick")
