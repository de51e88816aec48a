"""Measurements of links, as nodes and the learner tell them, and what the chains and the capacity rule make of them.

Invariant: what `links` decides is kept in the rows of job and nodes, so that a restart goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.links import SURE, Link, hop, learn, wire_mbps
from app.protocol.learner import LearnerHeartbeat
from app.protocol.node import Heartbeat, NodeState
from app.storage.models import Job, Lease, Node

PLACED = (NodeState.JOINING, NodeState.WARMING, NodeState.ACTIVE, NodeState.DRAINING)
LEARNER = "learner"


def up_link(node: Node, lease: Lease) -> Link:
    """What a node sends."""
    return Link(lease.up_mbps, node.up_measured, node.up_used)


def down_link(node: Node, lease: Lease) -> Link:
    """What a node receives."""
    return Link(lease.down_mbps, node.down_measured, node.down_used)


def learner_link(job: Job, uplink_mbps: float) -> Link:
    """B_0; the setting is its prior."""
    return Link(uplink_mbps, job.uplink_measured, job.uplink_used)


def down_mbps(node: Node | None, lease: Lease) -> float:
    """What to reckon a machine's downlink with, whether its node has joined or not; 0: not known."""
    return lease.down_mbps if node is None else down_link(node, lease).mbps


def up_mbps(node: Node | None, lease: Lease) -> float:
    """The same of its uplink."""
    return lease.up_mbps if node is None else up_link(node, lease).mbps


async def take_node(
    session: AsyncSession, job: Job, node: Node, lease: Lease, beat: Heartbeat, *, store_has_room: bool
) -> bool:
    """Take what a node has measured. True: somebody's link is taken for another than before, so chains may change.

    `store_has_room`: the object store sends whatever a node can take.
    """
    if beat.down_bytes_per_s is None and beat.up_bytes_per_s is None:
        return False
    changed = False
    if beat.down_bytes_per_s is not None:
        rate = wire_mbps(beat.down_bytes_per_s)
        limited = store_has_room if beat.down_source == "store" else await _own_limit(session, job, beat, rate)
        changed = _put_down(node, learn(down_link(node, lease), rate, limited=limited))
    if beat.up_bytes_per_s is not None:
        rate = wire_mbps(beat.up_bytes_per_s)
        children = await _pulling_from(session, job, node.id)
        if len(children) == 1:
            child, its_lease = children[0]
            up, down = hop(rate, beat.up_limited, up_link(node, lease), down_link(child, its_lease))
            changed |= _put_down(child, down)
        else:
            # Whose share of the relay was which can't be told.
            up = learn(up_link(node, lease), rate, limited=False)
        changed |= _put_up(node, up)
    return changed


async def take_learner(session: AsyncSession, job: Job, beat: LearnerHeartbeat, uplink_mbps: float) -> bool:
    """Take what the learner's relay has measured. True: B_0 is taken for another than before."""
    if beat.up_bytes_per_s is None:
        return False
    heads = await _pulling_from(session, job, LEARNER)
    links = [down_link(n, x) for n, x in heads]
    together = links[0] if len(links) == 1 else Link(sum(x.mbps for x in links), sum(x.measured or 0.0 for x in links))
    before = learner_link(job, uplink_mbps)
    link, down = hop(wire_mbps(beat.up_bytes_per_s), beat.up_limited, before, together)
    job.uplink_measured, job.uplink_used = link.measured, link.used
    changed = len(heads) == 1 and _put_down(heads[0][0], down)
    return changed or link.used != before.used


async def _own_limit(session: AsyncSession, job: Job, beat: Heartbeat, rate: float) -> bool:
    """Whether what a node receives is limited by its own link, its source being a learner whose uplink was seen to
    carry clearly more for each of its children. Of a peer its parent's relay tells."""
    if beat.down_source != LEARNER or job.uplink_measured is None:
        return False
    children = len(await _pulling_from(session, job, LEARNER))
    return job.uplink_measured / max(1, children) >= SURE * rate


async def _pulling_from(session: AsyncSession, job: Job, upstream: str) -> Sequence[tuple[Node, Lease]]:
    found = await session.execute(
        select(Node, Lease)
        .join(Lease, Lease.id == Node.lease_id)
        .where(Node.job_id == job.id, Node.upstream == upstream, Node.state.in_(PLACED))
    )
    return list(found.tuples())


def _put_up(node: Node, link: Link) -> bool:
    changed = link.used != node.up_used
    node.up_measured, node.up_used = link.measured, link.used
    return changed


def _put_down(node: Node, link: Link) -> bool:
    changed = link.used != node.down_used
    node.down_measured, node.down_used = link.measured, link.used
    return changed
