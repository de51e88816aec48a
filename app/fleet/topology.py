"""Who pulls snapshots from whom. Pure.

Invariant: every node has at most one child in a chain (fan-out 1), no cycle exists, and the upstream list of a node is
its parent, its further ancestors, the learner, the object store, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """A node as the topology sees it."""

    node_id: str
    up_mbps: float
    down_mbps: float
    reachable: bool
    """Whether peers can connect to its relay."""
    reliability: float
    chain: int | None = None
    """Where it is now, so that nobody moves without need."""
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a node: chain number, position in it (0 pulls from the learner), ancestors nearest first."""

    chain: int
    position: int
    ancestors: tuple[str, ...]


def chain_count(uplink_mbps: float, members: Sequence[Member]) -> int:
    """N_ch ≈ ⌊B_0 / B_w⌋, at least one, at most one per node. B_w is the slowest link among the relaying nodes."""
    if not members:
        return 0
    relays = [min(m.up_mbps, m.down_mbps) for m in members if m.reachable]
    link = min(relays) if relays else uplink_mbps
    return max(1, min(len(members), int(uplink_mbps // max(link, 1e-9))))


def arrange(uplink_mbps: float, members: Sequence[Member]) -> dict[str, Place]:
    """Place every node. Those in a chain keep chain and order; newcomers go to the end of the shortest chain.

    Nodes that peers can't reach stand at the tails: at most one per chain can, the rest pull from the learner or the
    store as chains of their own.
    """
    count = chain_count(uplink_mbps, members)
    chains: list[list[Member]] = [[] for _ in range(count)]
    settled = [m for m in members if m.reachable and m.chain is not None and m.chain < count]
    for member in sorted(settled, key=lambda m: (m.position or 0, m.node_id)):
        chains[member.chain or 0].append(member)
    fresh = [m for m in members if m.reachable and (m.chain is None or m.chain >= count)]
    for member in sorted(fresh, key=lambda m: (-m.up_mbps, -m.reliability, m.node_id)):
        min(chains, key=len).append(member)
    tails = iter(sorted((m for m in members if not m.reachable), key=lambda m: (-m.down_mbps, m.node_id)))
    for chain in sorted(chains, key=len):
        tail = next(tails, None)
        if tail is None:
            break
        chain.append(tail)
    chains.extend([tail] for tail in tails)
    return {
        member.node_id: Place(index, position, tuple(m.node_id for m in reversed(chain[:position])))
        for index, chain in enumerate(chains)
        for position, member in enumerate(chain)
    }


def depth(places: dict[str, Place]) -> int:
    """Length of the longest chain, in hops."""
    return max((p.position + 1 for p in places.values()), default=0)
