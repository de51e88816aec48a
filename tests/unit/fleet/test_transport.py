"""Which way is cheapest: table of prices, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.topology import Place
from app.fleet.transport import Prices, Transport, cheapest, estimate, upstreams

GB = 10**9


@pytest.mark.parametrize(
    ("peer", "store", "hour", "nodes", "way"),
    [
        (0, 0, 0, 9, Transport.CHAIN),  # nothing costs anything: the fastest
        (0, 90_000, 0, 9, Transport.CHAIN),  # S3 egress at $0.09 a GB, peers free
        (20_000, 10_000, 0, 9, Transport.STAR),  # peers pay, the learner doesn't, and time is worth nothing
        (20_000, 0, 1_000_000, 9, Transport.STORE),  # a store without egress fees, and the pool costs $1 an hour
        (20_000, 90_000, 900_000, 9, Transport.STAR),
        (20_000, 90_000, 900_000_000, 9, Transport.CHAIN),  # a dear pool: time decides
        (20_000, 10_000, 1_800_000, 9, Transport.STORE),
        (20_000, 0, 0, 1, Transport.CHAIN),  # one node has no peer to pay
    ],
)
def test_prices_decide(peer: int, store: int, hour: int, nodes: int, way: Transport) -> None:
    prices = Prices([peer] * nodes, store_egress=store, pool_hour=hour)
    assert cheapest(estimate(GB, nodes, 200.0, 100.0, prices)).transport is way


def test_what_each_way_costs() -> None:
    prices = Prices([10_000] * 9, learner_upload=1000, store_egress=20_000, pool_hour=3_600_000)
    found = estimate(GB, 9, 200.0, 100.0, prices)
    assert round(found[Transport.CHAIN].seconds, 1) == 80.2
    assert found[Transport.STAR].seconds == 360.0
    assert found[Transport.STORE].seconds == 120.0
    assert found[Transport.CHAIN].micros == 2 * 1000 + 7 * 10_000 + round(found[Transport.CHAIN].seconds * 1000)
    assert found[Transport.STAR].micros == 9 * 1000 + 360_000
    assert found[Transport.STORE].micros == 1000 + 9 * 20_000 + 120_000


@given(
    size=st.integers(1, 10**12),
    nodes=st.integers(0, 60),
    uplink=st.floats(1, 1e5),
    node=st.floats(1, 1e5),
    peer=st.integers(0, 10**6),
    store=st.integers(0, 10**6),
    hour=st.integers(0, 10**9),
)
def test_the_choice_is_never_dearer_than_another(
    size: int, nodes: int, uplink: float, node: float, peer: int, store: int, hour: int
) -> None:
    found = estimate(size, nodes, uplink, node, Prices([peer] * nodes, store_egress=store, pool_hour=hour))
    assert cheapest(found).micros == min(e.micros for e in found.values())
    dearer = estimate(size, nodes, uplink, node, Prices([peer] * nodes, store_egress=store + 1000, pool_hour=hour))
    assert dearer[Transport.STORE].micros >= found[Transport.STORE].micros


def test_the_upstream_list_follows_the_way() -> None:
    place = Place(0, 2, ("parent", "head"), ("tail",))
    assert [upstreams(way, place) for way in Transport] == [
        ["parent", "head", "learner", "tail", "store"],
        ["learner", "store"],
        ["store"],
    ]
