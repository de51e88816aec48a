"""What a node that must stop had begun: taken over, so that another node goes on with it.

Invariant: a beginning is taken only from the node that the group is leased to, and only while its oldest token is
admissible; a group of which it is not taken waits to be sampled from scratch. Who hands over gets no more work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import partials, replays, uploads
from app.fleet.commits import Commits
from app.fleet.exams import is_exam
from app.fleet.partials import Begun
from app.protocol import copies
from app.protocol.copies import Prints
from app.protocol.errors import Conflict, Gone, Refused
from app.protocol.job import JobSpec
from app.protocol.node import NodeState
from app.protocol.work import CommitRequest, PartialAnswer, UploadRequest, UploadSlot
from app.storage.models import ExamItem, ItemStatus, Job, Lease, Node, Trajectory, WorkItem


class HandBack(Commits):
    """Takes beginnings."""

    async def upload(self, node_id: str, request: UploadRequest) -> UploadSlot:
        """A place for one more file. Raises Gone, Conflict if the node has too many that it does not use."""
        async with self.core.db.read() as session:
            job_id = still_here(node := await session.get_one(Node, node_id)).job_id
            most = await self._most_places(session, node)
        # Nothing comes between this look and the next place: many may ask at a time.
        if (unused := self._places.unused(node_id, self.core.clock())) >= most:
            raise Conflict(_crowded(unused, most))
        return self._place(job_id, node_id, request.policy_version)

    def _place(self, job_id: str, node_id: str, version: int, items: Iterable[str] = ()) -> UploadSlot:
        slot = uploads.slot(self.core, job_id, node_id, version)
        self._places.given(node_id, slot.key, self.core.clock(), items)
        return slot

    async def _most_places(self, session: AsyncSession, node: Node) -> int:
        """How many places that it has not used a node may have."""
        held = 0
        for kind in (WorkItem, ExamItem):
            query = select(func.count()).select_from(kind)
            held += await session.scalar(query.where(kind.node_id == node.id, kind.status == ItemStatus.LEASED)) or 0
        return uploads.most_unused(held)

    async def _crowded(self, session: AsyncSession, node: Node) -> str:
        """Why a node gets no work, which comes with a place; empty if it may have some."""
        unused = self._places.unused(node.id, self.core.clock())
        if unused < uploads.most_unused(0) or unused < (most := await self._most_places(session, node)):
            return ""
        return _crowded(unused, most)

    async def take_partials(self, node_id: str, request: CommitRequest) -> PartialAnswer:
        """Validate a partial file that was put; its groups are pending again, with what it has of them.

        Raises Refused with the reason, counted on the node; its groups are then pending without.
        """
        try:
            taken = await self._take_over(node_id, request)
        except Refused as refusal:
            self._places.used(node_id, request.key, request.work_items)
            await self._count_refusal(node_id, request, refusal)
            raise
        self._places.used(node_id, request.key, taken)
        self.core.announce(await self._job_of(node_id), "work")
        return PartialAnswer(taken=taken)

    async def _take_over(self, node_id: str, request: CommitRequest) -> list[str]:
        groups = [name for name in request.work_items if not is_exam(name)]
        async with self.core.db.read() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            query = select(WorkItem).where(WorkItem.id.in_(groups), WorkItem.job_id == job.id)
            items = list(await session.scalars(query.order_by(WorkItem.ordinal)))
            twin = (await session.scalars(select(Trajectory.seq).where(Trajectory.key == request.key))).first()
        if twin is not None:
            raise Conflict("a trajectory file was committed under this key")
        uploads.check_key(request.key, job.id, node_id)
        spec, expected = JobSpec.model_validate(job.spec), partials.expected(job, items, groups)
        again = [i.id for i in items if i.partial_key == request.key and i.partial_blake3 == request.blake3]
        if again and not any(i.node_id == node_id and i.status == ItemStatus.LEASED for i in items):
            return again

        sizes = {name: e.group_size for name, e in expected.items()}

        def check(newest: int) -> tuple[dict[str, Begun], set[str], dict[str, Prints]]:
            table = partials.read(uploads.fetch(self.core, request), expected, newest, spec)
            # Who goes on from copies would be taken for a copier.
            prints = copies.check(table, sizes)
            return partials.begun(table), partials.not_continued(self.core, items, table), prints

        return await self._attach(node_id, request, *await self._patiently(job, check))

    async def _attach(
        self,
        node_id: str,
        request: CommitRequest,
        found: Mapping[str, Begun],
        scratch: Collection[str],
        prints: Mapping[str, Prints],
    ) -> list[str]:
        taken: list[str] = []
        spare: list[str | None] = [request.key]
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            query = select(WorkItem).where(
                WorkItem.id.in_(list(found)), WorkItem.node_id == node_id, WorkItem.status == ItemStatus.LEASED
            )
            items = list(await session.scalars(query.order_by(WorkItem.ordinal)))
            await replays.look(session, job, items, prints)
            for item in items:
                if job.step - found[item.id].version > job.staleness_budget:
                    item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
                    continue
                spare.append(partials.forget(item, unused=item.id in scratch))
                partials.attach(item, request, node_id, found[item.id])
                taken.append(item.id)
            await self.exams.hand_back(session, node_id, request.work_items)
            if taken:
                await self._lets_go(session, node)
                tokens = sum(found[name].tokens for name in taken)
                self.core.emit(
                    session, job.id, "groups_handed_back",
                    f"{len(taken)} groups with {tokens} tokens wait for a node that goes on with them", node=node_id,
                )  # fmt: skip
        await partials.release(self.core, spare)
        return taken

    async def _lets_go(self, session: AsyncSession, node: Node) -> None:
        """Who hands over has to stop. Taken at its word it can't go on leasing work to leave beginnings that nobody
        is held to."""
        if node.drain:
            return
        lease = await session.get_one(Lease, node.lease_id)
        node.drain, node.state_since = True, self.core.clock()
        lease.reason = "its node has handed its work over"


def still_here(node: Node) -> Node:
    """The node, if it may use the object store. Raises Gone: traffic costs, and its token outlives it."""
    if node.state in (NodeState.LOST, NodeState.GONE):
        raise Gone("this node was given up; its lease is over")
    return node


def _crowded(unused: int, most: int) -> str:
    return (
        f"uploads: this node has {unused} places for files that it has not used; with what it holds {most} are enough"
    )
