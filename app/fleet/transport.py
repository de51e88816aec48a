"""How snapshots travel to the nodes of a job: down chains, from the learner to each, or through the object store. Pure.

Invariant: the control service decides between these three in one place; nodes only ever see a list of upstreams.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.fleet.estimates import broadcast_time
from app.fleet.topology import Place

SECONDS_PER_HOUR = 3600


class Transport(StrEnum):
    """`chain`: learner → node → node …; `star`: the learner serves every node; `store`: every node reads the store."""

    CHAIN = "chain"
    STAR = "star"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Prices:
    """What a byte costs, in micro-dollars per GB sent, and what an hour of the pool costs, in micro-dollars."""

    peer_upload: Sequence[int]
    """Of each node that relays."""
    learner_upload: int = 0
    store_egress: int = 0
    pool_hour: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Micro-dollars and seconds of one broadcast."""

    transport: Transport
    micros: int
    seconds: float


def estimate(size: int, nodes: int, uplink_mbps: float, node_mbps: float, prices: Prices) -> dict[Transport, Estimate]:
    """What a broadcast of `size` bytes to `nodes` nodes costs by each way: bytes sent, and the pool's time for it.

    In a chain the last node sends nothing. The store is read by all at once, after the learner has put it there.
    """
    if nodes == 0:
        return {way: Estimate(way, 0, 0.0) for way in Transport}
    chains = min(nodes, max(1, int(uplink_mbps // node_mbps)))
    peer = round(statistics.fmean(prices.peer_upload)) if prices.peer_upload else 0
    put_s = size * 8e-6 / uplink_mbps
    seconds = {
        Transport.CHAIN: broadcast_time(size, nodes, uplink_mbps, node_mbps),
        Transport.STAR: size * 8e-6 / min(node_mbps, uplink_mbps / nodes),
        Transport.STORE: put_s + size * 8e-6 / node_mbps,
    }
    per_gb = {
        Transport.CHAIN: chains * prices.learner_upload + (nodes - chains) * peer,
        Transport.STAR: nodes * prices.learner_upload,
        Transport.STORE: prices.learner_upload + nodes * prices.store_egress,
    }
    return {
        way: Estimate(
            way,
            round(per_gb[way] * size / 1e9) + round(prices.pool_hour * seconds[way] / SECONDS_PER_HOUR),
            seconds[way],
        )
        for way in Transport
    }


def cheapest(estimates: dict[Transport, Estimate]) -> Estimate:
    """The cheapest way; of equally cheap ones the faster, of equally fast ones the first: chain, star, store."""
    order = list(Transport)
    return min(estimates.values(), key=lambda e: (e.micros, e.seconds, order.index(e.transport)))


LEARNER, STORE = "learner", "store"


def upstreams(transport: Transport, place: Place) -> list[str]:
    """A node's upstreams in order: node ids, LEARNER, STORE. Helpers wait for the learner, so they stand behind it."""
    if transport is Transport.CHAIN:
        return [*place.ancestors, LEARNER, *place.helpers, STORE]
    return [LEARNER, STORE] if transport is Transport.STAR else [STORE]
