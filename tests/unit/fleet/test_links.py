"""What links are taken for: who is to blame for a slow hop, and that noise moves nobody."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.links import BAND, Link, believed_bytes, culprit, hop, learn, wire_mbps
from app.fleet.topology import Member, arrange

MBPS = st.floats(1.0, 10_000.0)
LINKS = st.builds(Link, st.just(0.0) | MBPS, st.none() | MBPS, st.none() | MBPS)


def test_packet_headers_count() -> None:
    assert wire_mbps(12_066_667) == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize(
    ("link", "rate", "limited", "mbps", "measured"),
    [
        (Link(100.0), 95.0, True, 100.0, 95.0),  # as advertised, nearly
        (Link(100.0), 40.0, True, 40.0, 40.0),
        (Link(100.0), 40.0, False, 100.0, 40.0),  # somebody else held it up
        (Link(100.0), 300.0, False, 300.0, 300.0),  # it carries more than advertised
        (Link(100.0), 110.0, False, 100.0, 110.0),
        (Link(0.0), 50.0, False, 50.0, 50.0),  # the provider doesn't tell
        (Link(0.0), 50.0, True, 50.0, 50.0),
        (Link(100.0, 40.0, 40.0), 200.0, False, 200.0, 200.0),  # it was slow and isn't any more
        (Link(100.0, 40.0, 40.0), 42.0, True, 40.0, 41.0),
        (Link(100.0, 300.0, 300.0), 100.0, True, 200.0, 200.0),  # smoothed
    ],
)
def test_what_a_measurement_makes_of_a_link(
    link: Link, rate: float, limited: bool, mbps: float, measured: float
) -> None:
    after = learn(link, rate, limited=limited)
    assert (after.mbps, after.measured) == (mbps, measured)


@given(LINKS, MBPS)
def test_a_lower_bound_never_lowers(link: Link, rate: float) -> None:
    after = learn(link, rate, limited=False)
    assert after.mbps >= link.mbps
    assert after.mbps >= rate / (1 + BAND) * (1 - 1e-9)
    assert (after.measured or 0.0) >= max(rate, link.measured or 0.0)


@given(LINKS, MBPS)
def test_a_limit_that_is_seen_again_and_again_is_believed(link: Link, rate: float) -> None:
    for _ in range(60):
        link = learn(link, rate, limited=True)
    assert link.measured == pytest.approx(rate)
    assert abs(link.mbps - rate) <= max(BAND * link.mbps, 1e-6 * rate)


@given(st.floats(10, 5000), st.lists(st.floats(0.85, 1.15), min_size=1, max_size=50), st.booleans())
def test_noise_within_the_band_changes_nothing(true: float, noise: list[float], limited: bool) -> None:
    link = Link(true)
    for factor in noise:
        link = learn(link, true * factor, limited=limited)
        assert link.used is None


@pytest.mark.parametrize(
    ("rate", "sender", "receiver", "who"),
    [
        (100.0, Link(1000.0), Link(100.0), "receiver"),  # as the receiver's provider says
        (100.0, Link(105.0), Link(1000.0), "sender"),
        (100.0, Link(100.0), Link(100.0), "sender"),
        (100.0, Link(110.0), Link(100.0), "receiver"),
        (100.0, Link(1000.0), Link(1000.0), "sender"),  # not known: it stands aside, and the next will show
        (100.0, Link(1000.0, 500.0), Link(1000.0), "receiver"),  # another had more from this sender
        (100.0, Link(1000.0, 500.0), Link(1000.0, 500.0), "sender"),
        (100.0, Link(1000.0), Link(1000.0, 500.0), "sender"),
        (100.0, Link(0.0), Link(100.0), "receiver"),
        (100.0, Link(0.0), Link(0.0), "sender"),
    ],
)
def test_who_is_to_blame(rate: float, sender: Link, receiver: Link, who: str) -> None:
    assert culprit(rate, sender, receiver) == who


@given(MBPS, LINKS, LINKS)
def test_at_most_one_end_of_a_hop_is_lowered(rate: float, sender: Link, receiver: Link) -> None:
    up, down = hop(rate, True, sender, receiver)
    assert not (up.mbps < sender.mbps and down.mbps < receiver.mbps)
    unlimited = hop(rate, False, sender, receiver)
    assert unlimited[0].mbps >= sender.mbps
    assert unlimited[1].mbps >= receiver.mbps


def settled(members: list[Member], uplink: float) -> list[Member]:
    places = arrange(uplink, members)
    return [replace(m, chain=places[m.node_id].chain, position=places[m.node_id].position) for m in members]


@given(seed=st.integers(0, 2**32))
def test_noise_in_measurements_moves_nobody(seed: int) -> None:
    rng = random.Random(seed)
    links = {f"n{i}": Link(rng.choice([100.0, 250.0, 1000.0])) for i in range(rng.randrange(1, 12))}
    true = {name: link.advertised for name, link in links.items()}
    uplink = Link(rng.choice([200.0, 1000.0, 1050.0]))
    members = settled([Member(n, x.mbps, x.mbps, True, 0.99) for n, x in links.items()], uplink.mbps)
    before, b0 = arrange(uplink.mbps, members), uplink.mbps
    for _ in range(10):
        links = {n: learn(x, true[n] * rng.uniform(0.83, 1.17), limited=True) for n, x in links.items()}
        uplink = learn(uplink, b0 * rng.uniform(0.83, 1.17), limited=True)
        members = [replace(m, up_mbps=links[m.node_id].mbps, down_mbps=links[m.node_id].mbps) for m in members]
        assert arrange(uplink.mbps, members) == before


@given(seed=st.integers(0, 2**32), slow_end=st.sampled_from(["up", "down"]))
def test_a_slow_end_is_found_and_stands_behind(seed: int, slow_end: str) -> None:
    """One machine has a tenth of what it advertises; every hop of a chain is measured after each arrangement."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(rng.randrange(3, 7))]
    liar = rng.choice(names)
    true_up = {n: 10.0 if (n, slow_end) == (liar, "up") else 100.0 for n in names}
    true_down = {n: 10.0 if (n, slow_end) == (liar, "down") else 100.0 for n in names}
    up, down = {n: Link(100.0) for n in names}, {n: Link(100.0) for n in names}
    members = settled([Member(n, 100.0, 100.0, True, 0.99) for n in names], 100.0)
    arrangements = [arrange(100.0, members)]
    for _ in range(12):
        chain = sorted(names, key=lambda n: arrangements[-1][n].position)
        flow = true_down[chain[0]]
        down[chain[0]] = learn(down[chain[0]], flow, limited=False)
        for parent, child in pairwise(chain):
            carries = min(true_up[parent], true_down[child])
            limited = carries <= flow
            flow = min(flow, carries)
            up[parent], down[child] = hop(flow, limited, up[parent], down[child])
        members = [replace(m, up_mbps=up[m.node_id].mbps, down_mbps=down[m.node_id].mbps) for m in members]
        members = settled(members, 100.0)
        arrangements.append(arrange(100.0, members))
    chain = sorted(names, key=lambda n: arrangements[-1][n].position)
    assert arrangements[-1] == arrangements[-2] == arrangements[-3], "it comes to rest"
    if slow_end == "up":
        assert chain[-1] == liar


def test_a_sender_that_was_fast_once_is_not_believed_for_ever() -> None:
    sender, blamed = Link(1000.0, 900.0), 0
    while culprit(100.0, sender, Link(1000.0)) == "receiver" and blamed < 10:
        sender, child = hop(100.0, True, sender, Link(1000.0))
        assert (sender.mbps, child.mbps) == (1000.0, 100.0)
        blamed += 1
    assert 2 <= blamed <= 6
    assert hop(100.0, True, sender, Link(1000.0))[0].mbps < 130


def test_a_sender_loses_no_credit_to_a_child_that_is_known_to_be_slow() -> None:
    sender = Link(1000.0, 900.0)
    assert hop(100.0, True, sender, Link(100.0))[0] == sender


def test_who_receives_slowly_stands_behind_who_sends_slowly() -> None:
    members = settled([Member(n, 100.0, 100.0, True, 0.99) for n in "abcde"], 100.0)
    slow = {"a": {"down_mbps": 20.0}, "b": {"up_mbps": 20.0}}
    places = arrange(100.0, [replace(m, **slow.get(m.node_id, {})) for m in members])
    assert sorted(places, key=lambda n: places[n].position) == ["c", "d", "e", "b", "a"]


@pytest.mark.parametrize(
    ("said", "counted", "mbps", "seconds", "charged"),
    [
        (10**9, 0, 100.0, 3600.0, 10**9),
        (2**53 - 1, 0, 100.0, 3600.0, 183_000_000_000),
        (2**53 - 1, 0, 100.0, -5.0, 3_000_000_000),
        (0, 10**9, 100.0, 0.0, 10**9),
        (10**12, 0, 0.0, 3600.0, 10**12),
        (2**53 - 1, 0, 0.0, 0.0, 300_000_000_000),
    ],
)
def test_no_more_is_charged_than_a_link_can_have_carried(
    said: int, counted: int, mbps: float, seconds: float, charged: int
) -> None:
    assert believed_bytes(said, counted, mbps, seconds) == charged
