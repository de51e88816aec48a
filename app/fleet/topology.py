"""Who pulls snapshots from whom. Pure.

Invariant: every node has at most one child in a chain (fan-out 1), no cycle exists, and the upstream list of a node is
its parent, its further ancestors, the learner, the object store, in that order.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count


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
    """N_ch ≈ ⌊B_0 / B_w⌋, at least one, at most one per node. B_w is the median link of the relaying nodes."""
    return min(len(members), _streams(uplink_mbps, members))


def _streams(uplink_mbps: float, members: Sequence[Member]) -> int:
    """How many chains the learner's uplink feeds at the pace of their links, however many nodes there are."""
    relays = [min(m.up_mbps, m.down_mbps) for m in members if m.reachable]
    link = statistics.median_low(relays) if relays else uplink_mbps
    return max(1, int(uplink_mbps // max(link, 1e-9)))


def arrange(uplink_mbps: float, members: Sequence[Member]) -> dict[str, Place]:
    """Place every node. Those in a chain keep chain and order; newcomers go to the end of the shortest chain.

    Nodes that peers can't reach stand at the tails: at most one per chain can, the rest pull from the learner or the
    store as chains of their own.
    """
    streams = _streams(uplink_mbps, members)
    chains: dict[int, list[Member]] = {}
    tails: dict[int, Member] = {}
    fresh: list[Member] = []
    for member in sorted(members, key=lambda m: (m.position or 0, m.node_id)):
        if member.chain is None or (member.reachable and member.chain >= streams):
            fresh.append(member)
        elif member.reachable:
            chains.setdefault(member.chain, []).append(member)
        elif tails.setdefault(member.chain, member) is not member:
            fresh.append(member)
    for member in sorted(fresh, key=lambda m: (not m.reachable, -m.up_mbps, -m.reliability, m.node_id)):
        if member.reachable:
            chains.setdefault(_shortest(chains, tails, streams, whole=True), []).append(member)
        else:
            tails[_shortest(chains, tails, streams, whole=False)] = member
    full = {index: [*chains.get(index, []), *filter(None, [tails.get(index)])] for index in {*chains, *tails}}
    return {
        member.node_id: Place(index, position, tuple(m.node_id for m in reversed(chain[:position])))
        for index, chain in full.items()
        for position, member in enumerate(chain)
    }


def _shortest(chains: Mapping[int, Sequence[Member]], tails: Mapping[int, Member], streams: int, *, whole: bool) -> int:
    """Where the next node goes: for a relay (`whole`) the shortest chain, for a tail the shortest that has none; a new
    chain while the uplink feeds one more, and for a tail that no chain can take."""
    used = {*chains, *tails}
    free = next(index for index in count() if index not in used)
    choice = {index for index in used if index < streams} if whole else {*chains} - {*tails}
    if free < streams or not choice:
        choice.add(free)
    return min(choice, key=lambda index: (len(chains.get(index, ())) + (index in tails), index))


def depth(places: dict[str, Place]) -> int:
    """Length of the longest chain, in hops."""
    return max((p.position + 1 for p in places.values()), default=0)
