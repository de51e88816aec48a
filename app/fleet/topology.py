"""Who pulls snapshots from whom. Pure.

Invariant: every node has at most one child in a chain (fan-out 1), no cycle exists, and the upstream list of a node is
its parent, its further ancestors, the learner, its helpers, the object store, in that order. Nodes that would hold up
others stand behind them: the slow at the ends of the chains, and those that peers can't reach at the very end.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

SLOW_SHARE = 0.6
"""A node is slow when its link, as far as measured, is below this share of the median."""
HELPERS = 2


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
    """Position of a node: chain number, position in it (0 pulls from the learner), ancestors nearest first.

    `helpers`: the last relays of other chains, whose uplinks carry nothing. They are for those whose parent lies, while
    the parent's own upstream goes on feeding it.
    """

    chain: int
    position: int
    ancestors: tuple[str, ...]
    helpers: tuple[str, ...] = ()


def chain_count(uplink_mbps: float, members: Sequence[Member]) -> int:
    """N_ch ≈ ⌊B_0 / B_w⌋, at least one, at most one per node. B_w is the median link of the relaying nodes."""
    return min(len(members), _streams(uplink_mbps, members))


def _streams(uplink_mbps: float, members: Sequence[Member]) -> int:
    """How many chains the learner's uplink feeds at the pace of their links, however many nodes there are."""
    return max(1, int(uplink_mbps // max(_median_link(members, uplink_mbps), 1e-9)))


def _median_link(members: Sequence[Member], default: float) -> float:
    relays = [_link(m) for m in members if m.reachable]
    return statistics.median_low(relays) if relays else default


def _link(member: Member) -> float:
    return min(member.up_mbps, member.down_mbps)


def _behind(member: Member, slow_below: float) -> int:
    """0: it holds nobody up. 1: it sends slowly, which only those behind it feel. 2: it receives slowly, so that even
    behind those it loses nothing."""
    return 2 if member.down_mbps < slow_below else 1 if member.up_mbps < slow_below else 0


def arrange(uplink_mbps: float, members: Sequence[Member]) -> dict[str, Place]:
    """Place every node. Those in a chain keep chain and order; newcomers go to the end of the shortest chain.

    One whose link has become slow goes behind those of its chain that aren't. Nodes that peers can't reach stand at the
    tails: at most one per chain can, the rest pull from the learner or the store as chains of their own.
    """
    streams = _streams(uplink_mbps, members)
    slow_below = SLOW_SHARE * _median_link(members, uplink_mbps)
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
    for chain in chains.values():
        chain.sort(key=lambda m: _behind(m, slow_below))
    full = {index: [*chains.get(index, []), *filter(None, [tails.get(index)])] for index in {*chains, *tails}}
    idle = {index: chain[-1] for index, chain in chains.items() if _link(chain[-1]) >= slow_below}
    return {
        member.node_id: Place(
            index, position, tuple(m.node_id for m in reversed(chain[:position])), _helpers(index, idle)
        )
        for index, chain in full.items()
        for position, member in enumerate(chain)
    }


def _helpers(chain: int, idle: Mapping[int, Member]) -> tuple[str, ...]:
    """The last relays of the chains after this one, in the round, so that not all have the same."""
    others = sorted((index for index in idle if index != chain), key=lambda index: (index < chain, index))
    return tuple(idle[index].node_id for index in others[:HELPERS])


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
