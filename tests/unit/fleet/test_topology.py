"""Chains: fan-out one, no cycles, nobody moves without need."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet.topology import Member, Place, arrange, chain_count, depth


def member(name: str, mbps: float = 100.0, *, reachable: bool = True, reliability: float = 0.99) -> Member:
    return Member(name, mbps, mbps, reachable, reliability)


def settle(members: list[Member], places: dict[str, Place]) -> list[Member]:
    return [replace(m, chain=places[m.node_id].chain, position=places[m.node_id].position) for m in members]


def parents(places: dict[str, Place]) -> dict[str, str | None]:
    return {node: (place.ancestors[0] if place.ancestors else None) for node, place in places.items()}


def check(members: list[Member], places: dict[str, Place]) -> None:
    """What holds for every arrangement."""
    assert set(places) == {m.node_id for m in members}, "every node is placed, nobody else"
    seats = Counter((p.chain, p.position) for p in places.values())
    assert max(seats.values(), default=1) == 1
    reachable = {m.node_id: m.reachable for m in members}
    children = Counter(parent for parent in parents(places).values() if parent is not None)
    assert max(children.values(), default=0) <= 1, "fan-out is at most one"
    assert all(reachable[parent] for parent in children), "nobody pulls from a node that peers can't reach"
    for node, place in places.items():
        assert len(place.ancestors) == place.position
        assert node not in place.ancestors
        assert len(set(place.ancestors)) == len(place.ancestors), "no cycle"
        for ancestor, position in zip(place.ancestors, range(place.position - 1, -1, -1), strict=True):
            assert (places[ancestor].chain, places[ancestor].position) == (place.chain, position), "nearest first"
        for helper in place.helpers:
            assert reachable[helper]
            assert places[helper].chain != place.chain


MEMBERS = st.lists(
    st.builds(
        Member,
        st.uuids().map(str),
        st.floats(0.0, 5000.0),
        st.floats(0.0, 5000.0),
        st.booleans(),
        st.floats(0, 1),
        st.none() | st.integers(0, 40),
        st.none() | st.integers(0, 40),
    ),
    max_size=25,
    unique_by=lambda m: m.node_id,
)


@given(uplink=st.floats(0.1, 1e6), members=MEMBERS)
def test_any_fleet_from_any_state_is_arranged_well(uplink: float, members: list[Member]) -> None:
    places = arrange(uplink, members)
    check(members, places)
    assert places == arrange(uplink, list(reversed(members))), "the order of the query does not matter"
    again = arrange(uplink, settle(members, places))
    assert again == places, "arranging twice moves nobody"


@pytest.mark.parametrize(
    ("uplink", "links", "chains"),
    [
        (800.0, [525.0] * 9, 1),  # the paper's figure: one chain of nine
        (1000.0, [100.0] * 9, 9),
        (1000.0, [100.0] * 30, 10),
        (1000.0, [300.0] * 30, 3),
        (1000.0, [5000.0] * 5, 1),
        (1000.0, [100.0] * 2, 2),
        (1000.0, [0.0] * 4, 4),
        (1000.0, [500.0, 500.0, 500.0, 500.0, 1.0], 2),  # one slow node does not make it a star
        (1000.0, [], 0),
    ],
)
def test_chain_count(uplink: float, links: list[float], chains: int) -> None:
    members = [member(f"n{i}", mbps) for i, mbps in enumerate(links)]
    places = arrange(uplink, members)
    check(members, places)
    assert chain_count(uplink, members) == chains
    assert len({p.chain for p in places.values()}) == chains
    if members:
        assert depth(places) == -(-len(members) // chains), "no chain is longer than it must be"


def test_depth_of_nothing() -> None:
    assert depth({}) == 0


def test_fast_and_steady_nodes_are_near_the_head() -> None:
    members = [
        member("slow", 50),
        member("fast", 400),
        member("shaky", 300, reliability=0.5),
        member("steady", 300, reliability=0.99),
        member("hidden", 900, reachable=False),
    ]
    places = arrange(300.0, members)
    check(members, places)
    chain = sorted(places, key=lambda n: places[n].position)
    assert chain == ["fast", "steady", "shaky", "slow", "hidden"]
    assert places["hidden"].ancestors == ("slow", "shaky", "steady", "fast")


def test_one_tail_a_chain_and_the_rest_alone() -> None:
    members = [*(member(f"r{i}") for i in range(4)), *(member(f"u{i}", reachable=False) for i in range(5))]
    places = arrange(200.0, members)
    check(members, places)
    alone = [n for n, p in places.items() if n.startswith("u") and p.position == 0]
    assert len(alone) == 3, "two chains take one tail each"


def test_a_newcomer_goes_where_fewest_are_tails_included() -> None:
    placed = [
        replace(member("a"), chain=0, position=0),
        replace(member("hidden", reachable=False), chain=0, position=1),
        replace(member("b"), chain=1, position=0),
    ]
    assert arrange(200.0, [*placed, member("new")])["new"].ancestors == ("b",)


def test_only_unreachable_nodes() -> None:
    members = [member(f"u{i}", reachable=False) for i in range(3)]
    places = arrange(100.0, members)
    check(members, places)
    assert all(p.position == 0 for p in places.values())


def steps_of(seed: int) -> tuple[random.Random, float]:
    rng = random.Random(seed)
    return rng, rng.choice([150.0, 350.0, 1000.0, 3000.0])


@given(seed=st.integers(0, 2**32))
def test_joining_and_leaving_moves_as_few_as_possible(seed: int) -> None:
    """Equal links: the number of chains that the uplink feeds is constant, so nobody has a reason to move."""
    rng, uplink = steps_of(seed)
    members: list[Member] = []
    places: dict[str, Place] = {}
    for step in range(40):
        before, old = {m.node_id: m for m in members}, places
        if members and rng.random() < 0.4:
            gone = members.pop(rng.randrange(len(members)))
            joined = None
        else:
            gone, joined = None, member(f"n{step}", 100.0, reachable=rng.random() < 0.7)
            members.append(joined)
        places = arrange(uplink, members)
        check(members, places)
        stayed = [m for m in members if m.node_id in before]
        for m in stayed:
            assert places[m.node_id].chain == old[m.node_id].chain, "who stays keeps its chain"
        for a in stayed:
            for b in stayed:
                if old[a.node_id].chain == old[b.node_id].chain and old[a.node_id].position < old[b.node_id].position:
                    assert places[a.node_id].position < places[b.node_id].position, "and its order"
        moved = {n for n, p in parents(places).items() if n in before and p != parents(old)[n]}
        if gone is not None:
            behind = {n for n, p in parents(old).items() if p == gone.node_id}
            assert moved == behind, "only the child of the one that left gets another parent"
        elif joined is not None and joined.reachable:
            tails = {m.node_id for m in stayed if not m.reachable}
            assert len(moved) <= 1
            assert moved <= tails, "at most a tail makes room for a relay"
        else:
            assert moved == set()
        members = settle(members, places)


def test_one_that_becomes_slow_goes_behind_its_chain_and_nobody_else_moves() -> None:
    members = [member(f"n{i}", 100.0) for i in range(6)]
    places = arrange(200.0, members)
    first = sorted((n for n, p in places.items() if p.chain == 0), key=lambda n: places[n].position)
    slower = [replace(m, up_mbps=40.0) if m.node_id == first[0] else m for m in settle(members, places)]
    after = arrange(200.0, slower)
    check(slower, after)
    assert sorted((n for n, p in after.items() if p.chain == 0), key=lambda n: after[n].position) == [
        *first[1:],
        first[0],
    ]
    assert {n: (p.position, p.ancestors) for n, p in after.items() if p.chain == 1} == {
        n: (p.position, p.ancestors) for n, p in places.items() if p.chain == 1
    }
    assert arrange(200.0, settle(slower, after)) == after
    assert all(first[0] not in p.helpers for p in after.values()), "a slow one helps nobody"


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), uplink=st.floats(50, 2000))
def test_nobody_fast_is_behind_somebody_slow(seed: int, uplink: float) -> None:
    rng = random.Random(seed)
    members = [member(f"n{i}", rng.choice([100.0, 110.0, 30.0])) for i in range(rng.randrange(1, 20))]
    places = arrange(uplink, members)
    check(members, places)
    links = {m.node_id: m.up_mbps for m in members}
    median = sorted(links.values())[(len(links) - 1) // 2]
    for node, place in places.items():
        for ancestor in place.ancestors:
            assert not links[ancestor] < 0.6 * median <= links[node]


def test_helpers_are_the_tails_of_the_other_chains() -> None:
    members = [member(f"n{i}") for i in range(6)]
    places = arrange(200.0, members)
    tails = {p.chain: n for n, p in places.items() if p.position == 2}
    assert all(p.helpers == (tails[1 - p.chain],) for p in places.values())
    assert all(p.helpers == () for p in arrange(100.0, members).values()), "one chain has nobody idle"


def test_helpers_are_those_of_the_next_two_chains_in_the_round() -> None:
    places = arrange(400.0, [member(f"n{i}") for i in range(8)])
    tails = {p.chain: n for n, p in places.items() if p.position == 1}
    assert sorted(tails) == [0, 1, 2, 3]
    for place in places.values():
        assert place.helpers == tuple(tails[(place.chain + n) % 4] for n in (1, 2))


@pytest.mark.parametrize(("mbps", "order"), [(65.0, "abcd"), (55.0, "acdb")])
@pytest.mark.parametrize("way", ["up_mbps", "down_mbps"])
def test_less_than_three_fifths_of_the_usual_link_is_slow(mbps: float, order: str, way: str) -> None:
    members = settle([member(n) for n in "abcd"], arrange(100.0, [member(n) for n in "abcd"]))
    places = arrange(100.0, [replace(m, **{way: mbps}) if m.node_id == "b" else m for m in members])
    assert "".join(sorted(places, key=lambda n: places[n].position)) == order


def test_fewer_chains_after_links_became_faster_move_only_who_must() -> None:
    members = [member(f"n{i}", 100.0) for i in range(6)]
    places = arrange(300.0, members)
    assert {p.chain for p in places.values()} == {0, 1, 2}
    faster = [replace(m, up_mbps=150.0, down_mbps=150.0) for m in settle(members, places)]
    after = arrange(300.0, faster)
    check(faster, after)
    assert {p.chain for p in after.values()} == {0, 1}
    for node, place in places.items():
        if place.chain < 2:
            assert replace(after[node], helpers=place.helpers) == place


def test_a_relay_that_peers_lose_leaves_the_middle_of_its_chain() -> None:
    members = [member(n) for n in "abc"]
    places = arrange(100.0, members)
    hidden = [replace(m, reachable=m.node_id != "b") for m in settle(members, places)]
    after = arrange(100.0, hidden)
    check(hidden, after)
    assert after["c"].ancestors == ("a",)
    assert after["b"].ancestors == ("c", "a")
