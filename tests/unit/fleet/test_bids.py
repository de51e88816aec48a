"""Bids: never above what limits them, raised before the floor arrives, lowered when it has gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.bids import (
    COOLDOWN_MAX_S,
    COOLDOWN_S,
    FORGIVEN_S,
    SWING,
    Caps,
    bid,
    cooldown_s,
    limit,
    lowered,
    presses,
    troubles,
)

NONE = Caps()
MONEY = st.integers(1, 10**8)
MAYBE = st.none() | MONEY


@pytest.mark.parametrize(
    ("floor", "caps", "worth", "made"),
    [
        (100_000, NONE, None, 115_000),
        (100_000, Caps(user=110_000), None, 110_000),
        (100_000, Caps(user=200_000), None, 115_000),
        (100_000, Caps(on_demand=105_000), None, 105_000),
        (100_000, Caps(user=110_000, on_demand=105_000), 103_000, 103_000),
        (100_000, NONE, 100_000, 100_000),
        (100_000, Caps(user=99_999), None, None),
        (100_000, Caps(on_demand=99_999), None, None),
        (100_000, NONE, 99_999, None),
    ],
)
def test_a_bid(floor: int, caps: Caps, worth: int | None, made: int | None) -> None:
    assert bid(floor, caps, worth) == made


@given(floor=MONEY, user=MAYBE, on_demand=MAYBE, worth=MAYBE)
def test_no_bid_is_above_a_limit_or_below_the_floor(
    floor: int, user: int | None, on_demand: int | None, worth: int | None
) -> None:
    made = bid(floor, Caps(user, on_demand), worth)
    limits = [x for x in (user, on_demand, worth) if x is not None]
    if made is None:
        assert floor > min(limits)
    else:
        assert floor <= made
        assert all(made <= x for x in limits)


@pytest.mark.parametrize(
    ("floor", "rate", "caps", "pressed", "lower"),
    [
        (100_000, 115_000, NONE, False, None),
        (110_000, 115_000, NONE, True, None),  # 5 % away: raised before it is outbid
        (116_000, 115_000, NONE, True, None),
        (110_000, 115_000, Caps(user=115_000), False, None),  # nothing more can be bid, and it is not outbid
        (116_000, 115_000, Caps(user=115_000), True, None),
        (80_000, 115_000, NONE, False, 92_000),  # we pay what we bid
        (89_000, 115_000, NONE, False, None),
        (0, 115_000, NONE, False, None),  # a floor that nobody told
    ],
)
def test_a_bid_follows_its_floor(floor: int, rate: int, caps: Caps, pressed: bool, lower: int | None) -> None:
    assert presses(floor, rate, caps) is pressed
    assert lowered(floor, rate, caps) == lower


@given(floor=MONEY, user=MAYBE, on_demand=MAYBE)
def test_a_fresh_bid_is_neither_raised_nor_lowered(floor: int, user: int | None, on_demand: int | None) -> None:
    caps = Caps(user, on_demand)
    made = bid(floor, caps)
    if made is not None:
        assert not presses(floor, made, caps)
        assert lowered(floor, made, caps) is None


def test_what_a_machine_is_worth_is_its_replacement_and_the_switch() -> None:
    assert limit(200_000, 0, 1.0, 0.0) == 200_000, "the price at which both have the same ρ"
    assert limit(200_000, 10_000, 1.0, 0.0) == 210_000
    assert limit(200_000, 10_000, 0.5, 0.0) == 220_000, "a switch pays itself back in less time"
    assert limit(170_000, 0, 1.0, 0.15) == 199_999, "a saving that is too small moves nobody"
    assert limit(170_000, 60_000, 1.0, 0.15) == 230_000, "nor one that does not pay for the switch"


def test_a_swing_is_followed_and_a_rise_is_not() -> None:
    worth = limit(170_000, 0, 1.0, 0.15)
    assert limit(170_000, 0, 1.0, 0.15, usual=180_000) == round(SWING * 180_000)
    assert limit(170_000, 0, 1.0, 0.15, usual=100_000) == worth
    assert limit(170_000, 0, 1.0, 0.15, usual=worth + 1) == worth, "usually too dear: no reason to follow it up"


def test_cool_downs_grow_and_are_forgiven() -> None:
    waits = [cooldown_s(n) for n in range(1, 20)]
    assert waits[:3] == [COOLDOWN_S, 2 * COOLDOWN_S, 4 * COOLDOWN_S]
    assert waits == sorted(waits)
    assert waits[-1] == COOLDOWN_MAX_S
    assert troubles(3, 1000.0, 1000.0 + FORGIVEN_S - 1) == 4
    assert troubles(3, 1000.0, 1000.0 + FORGIVEN_S) == 1
