"""Who is in the fleet of a job: places in chains, drains, losses.

Invariant: a node that goes leaves no leased work behind, and those that pulled from it have other upstreams; a lease
whose node works is renewed long before it ends. Who drains, by whose word ever, is gone within a bound.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import measured, quarantine, starts, tokens, topology, transport
from app.fleet.commits import REFUSED_TOLERATED
from app.fleet.core import Core
from app.fleet.exams import Exams
from app.fleet.leases import Leases
from app.fleet.sizes import size_of
from app.protocol.job import JobStatus
from app.protocol.node import NodeState
from app.storage.models import ExamItem, ItemStatus, Job, Lease, LeaseState, Node, WorkItem

log = logging.getLogger(__name__)

LIVE = (NodeState.JOINING, NodeState.WARMING, NodeState.ACTIVE, NodeState.DRAINING)
DRAIN_S = 45.0
"""A draining node is given this long to leave: it samples on for 30 s, and then hands over what is not finished."""
ENDING_DRAIN_S = 20.0
"""The same where the job itself ends, or is out of money: nobody goes on with what it has begun."""
LIES_TOLERATED = 2
PRESIGN_MAX_S = 7 * 24 * 3600.0
"""S3 signs no URL for longer."""


class Roster:
    """Takes nodes in and out."""

    def __init__(self, core: Core, leases: Leases) -> None:
        self.core = core
        self.leases = leases

    async def _arrange(self, session: AsyncSession, job: Job) -> None:
        """Place all live nodes in chains and write their upstream lists."""
        found = await session.execute(
            select(Node, Lease)
            .join(Lease, Lease.id == Node.lease_id)
            .where(Node.job_id == job.id, Node.state.in_(LIVE))
        )
        pairs = [(node, lease) for node, lease in found.all()]
        members = [
            topology.Member(
                n.id,
                measured.up_mbps(n, x),
                measured.down_mbps(n, x),
                n.relay_url is not None,
                x.reliability,
                n.chain,
                n.chain_position,
            )
            for n, x in pairs
        ]
        places = topology.arrange(self._uplink(job), members)
        urls = {n.id: n.relay_url or "" for n, _ in pairs}
        way = self._way(job, pairs)
        for node, _ in pairs:
            place = places[node.id]
            node.chain, node.chain_position = place.chain, place.position
            node.upstreams = [
                {"kind": u, "node_id": u} if u not in urls else {"kind": "peer", "url": urls[u], "node_id": u}
                for u in transport.upstreams(way, place)
                if urls.get(u, u)
            ]
        if way is transport.Transport.CHAIN:
            job.chain_depth_max = max(job.chain_depth_max, topology.depth(places))

    async def links_changed(self, session: AsyncSession, job: Job) -> None:
        """Links were measured to be others than they were taken for: nodes may change their places."""
        await session.flush()
        await self._arrange(session, job)

    def _uplink(self, job: Job) -> float:
        return measured.learner_link(job, self.core.settings.learner_uplink_mbps).mbps

    def _way(self, job: Job, pairs: Sequence[tuple[Node, Lease]]) -> transport.Transport:
        """How the job's snapshots travel: as the operator says, or the cheapest way for the size of the last one."""
        settings, size = self.core.settings, job.publish_bytes or job.snapshot_bytes
        wanted = job.spec["fleet"].get("transport") or settings.broadcast_transport
        if wanted != "auto":
            return transport.Transport(wanted)
        if not size:
            return transport.Transport.CHAIN
        links = [rate for n, x in pairs if (rate := min(measured.up_mbps(n, x), measured.down_mbps(n, x)))]
        prices = transport.Prices(
            [x.upload_micros_gb for n, x in pairs if n.relay_url is not None],
            store_egress=settings.store_egress_micros_gb,
            pool_hour=sum(x.rate_micros_h for _, x in pairs),
        )
        uplink = self._uplink(job)
        node_mbps = statistics.median_low(links) if links else min(uplink, 100.0)
        return transport.cheapest(transport.estimate(size, len(pairs), uplink, node_mbps, prices)).transport

    async def retire(self, session: AsyncSession, lease: Lease, reason: str) -> None:
        """Give a lease back in order: its node drains first, if it has one that works."""
        node = (await session.scalars(select(Node).where(Node.lease_id == lease.id))).first()
        if node is None or node.state not in LIVE:
            self.leases.request_release(session, lease, reason)
            return
        if not node.drain:
            if node.state != NodeState.DRAINING:  # of one that drains by its own word the time runs already
                node.state, node.state_since = NodeState.DRAINING, self.core.clock()
            node.drain = True
            node.reason = lease.reason = reason
            self.core.emit(session, lease.job_id, "node_draining", f"draining {lease.gpu_name}: {reason}", node=node.id)

    async def expire(self, session: AsyncSession, job: Job) -> None:
        """Nodes that were caught are out; those without heartbeats are lost; draining ones that take too long are cut
        off; those that do nothing are given up."""
        # Also those that have left since: what they brought is not trained on.
        caught = select(Node).where(Node.job_id == job.id, Node.caught.is_not(None), Node.quarantined_at.is_(None))
        for node in list(await session.scalars(caught)):
            await quarantine.quarantine(self.core, self, session, job, node, node.caught or "")
            if not job.rollouts_trained:
                await session.flush()
                await quarantine.give_up_if_hopeless(session, job)
        settings, now = self.core.settings, self.core.clock()
        timeout, starting = settings.heartbeat_timeout_seconds, settings.join_timeout_seconds
        lease_s = settings.lease_hours * 3600
        pairs = (
            await session.execute(
                select(Node, Lease)
                .join(Lease, Lease.id == Node.lease_id)
                .where(Node.job_id == job.id, Node.state.in_(LIVE))
            )
        ).all()
        busy = await self._busy(session, job)
        for node, lease in pairs:
            silent = now - max(node.heartbeat_at, self.core.started_at)
            if not LeaseState(lease.state).usable:
                await self._depart(session, node, NodeState.GONE, lease.reason, speechless=True)
            elif silent > timeout:
                why = f"no heartbeat for {silent:.0f} s"
                await self._depart(session, node, NodeState.LOST, why, speechless=True)
                await self.leases.cool_down(session, lease, why)
                self.core.emit(session, job.id, "node_lost", f"{lease.gpu_name}: {why}", node=node.id)
                self.leases.request_release(session, lease, why)
            elif _leaves(node) and now - node.state_since > (DRAIN_S if job.outcome is None else ENDING_DRAIN_S):
                why = lease.reason if node.drain else "its node said that it drains, and did not leave"
                await self._depart(session, node, NodeState.GONE, why)
                self.leases.request_release(session, lease, why)
            elif node.files_refused >= REFUSED_TOLERATED:
                failed = "its files were refused, its leases ran out or it could not answer"
                await self._give_up(session, node, lease, f"{node.files_refused} times in a row {failed}")
            elif why := starts.late_node(lease, node, job, now, starting, self.core.started_at):
                await self._give_up(session, node, lease, why)
            elif why := self._does_nothing(job, node, holds=node.id in busy):
                await self._give_up(session, node, lease, why)
                self.core.emit(session, job.id, "node_idle", f"{lease.gpu_name}: {why}", node=node.id)
            elif not node.drain and lease.expires_at - now < lease_s / 2:
                # Its end is a dead-man switch for the time when nobody is here to renew it.
                lease.expires_at = now + lease_s

    async def _give_up(self, session: AsyncSession, node: Node, lease: Lease, why: str) -> None:
        """Take out a node that is of no use; its machine is left alone for a while, and given back."""
        await self._depart(session, node, NodeState.LOST, why)
        await self.leases.cool_down(session, lease, why)
        self.leases.request_release(session, lease, why)

    @staticmethod
    async def _busy(session: AsyncSession, job: Job) -> set[str | None]:
        """Nodes that hold work."""
        found: set[str | None] = set()
        for kind in (WorkItem, ExamItem):
            query = select(kind.node_id).where(kind.job_id == job.id, kind.status == ItemStatus.LEASED).distinct()
            found |= set(await session.scalars(query))
        return found

    def _does_nothing(self, job: Job, node: Node, *, holds: bool) -> str:
        """Why a node that works on paper only is given up; empty if it is not."""
        now = self.core.clock()
        if self.core.store.away is not None:
            self.core.idle.forgive(now)
        if job.outcome is not None or job.status not in (JobStatus.PROVISIONING, JobStatus.RUNNING):
            return ""
        return self.core.idle.judge(
            node, now, holds=holds, working_since=job.status_since, listening_since=self.core.started_at
        )

    async def expel(self, session: AsyncSession, node: Node, lease: Lease, why: str, *, cooldown_s: float) -> None:
        """Take out a node that can't be trusted; its machine is left alone for so long, and given back."""
        if node.state in LIVE:
            await self._depart(session, node, NodeState.LOST, why)
        node.reason = why
        await self.leases.cool_down(session, lease, why, s=cooldown_s)
        self.leases.request_release(session, lease, why)

    async def _depart(
        self, session: AsyncSession, node: Node, state: NodeState, reason: str, *, speechless: bool = False
    ) -> None:
        """Take a node out: its leased work is pending again, its children get new upstreams. `speechless`: it can't
        tell any more what goes with it."""
        node.state, node.state_since, node.reason = state, self.core.clock(), reason
        self.core.idle.forget(node.id)
        # Who pulls from nobody any more can't say of anybody that it lies.
        node.chain, node.chain_position, node.upstreams = None, None, []
        leased = select(WorkItem).where(WorkItem.node_id == node.id, WorkItem.status == ItemStatus.LEASED)
        items = list(await session.scalars(leased))
        for item in items:
            item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
        await Exams.hand_back(session, node.id)
        job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
        if speechless:
            # On average half of each was there.
            tokens.reckon(self.core, job, "node_lost", sum(size_of(job, item) for item in items) / 2)
        await session.flush()
        await self._arrange(session, job)


def _leaves(node: Node) -> bool:
    """Whether it has to go, by our word or by its own."""
    return node.drain or node.state == NodeState.DRAINING
