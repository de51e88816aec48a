"""Caps over all jobs: whatever is rented in whatever order, they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.budget import Exposure
from app.fleet.purse import Room

USD = 1_000_000


@pytest.mark.parametrize(
    ("room", "price", "why"),
    [
        (Room({}), 100 * USD, ""),
        (Room({"a": USD}, per_hour=3 * USD), 2 * USD, ""),
        (Room({"a": USD}, per_hour=3 * USD), 2 * USD + 1, "max_usd_per_hour 3.000000"),
        (Room({"a": USD, "b": USD}, per_hour=3 * USD), 2 * USD, "max_usd_per_hour"),
        (Room({}, exposure=Exposure(USD, 0, 0), minimum_s=120), 15 * USD, ""),
        (Room({}, exposure=Exposure(USD, 0, 0), minimum_s=120), 15 * USD + 1, "max_usd_total 1.000000"),
        (Room({}, closed={"a": "no credit"}), 1, "a: no credit"),
        (Room({}, closed={"b": "no credit"}), 1, ""),
        (Room({"a": USD}, credit={"a": 2 * USD}, credit_hours=1.0), USD, ""),
        (Room({"a": USD}, credit={"a": 2 * USD}, credit_hours=1.0), USD + 1, "a: its credit of $2.000000"),
        (Room({"b": 9 * USD}, credit={"a": 2 * USD}, credit_hours=1.0), USD, ""),
    ],
)
def test_why_not(room: Room, price: int, why: str) -> None:
    got = room.why_not("a", price)
    assert got.startswith(why)
    assert bool(got) == bool(why)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3 * USD)), max_size=30),
    st.integers(1, 10 * USD), st.integers(1, 2 * USD),
)  # fmt: skip
def test_what_it_lets_pass_keeps_every_cap(wishes: list[tuple[str, int]], per_hour: int, total: int) -> None:
    room = Room(
        {}, exposure=Exposure(total, 0, 0), per_hour=per_hour, minimum_s=120, credit={"a": 2 * USD}, credit_hours=2.0
    )
    for provider, price in wishes:
        if not room.why_not(provider, price):
            room = room.plus(provider, price)
    assert room.burn <= per_hour
    assert room.excess == 0
    assert room.exposure is not None
    assert room.exposure.committed <= total
    assert room.burns.get("a", 0) * 2 <= 2 * USD


def test_a_price_that_rose_is_an_excess_of_what_stays() -> None:
    assert Room({"a": 5}, staying_micros_h=5, per_hour=3).excess == 2
    assert Room({"a": 5}, staying_micros_h=2, per_hour=3).excess == 0
    assert Room({"a": 5}, staying_micros_h=5).excess == 0


def test_credit_is_low_where_it_does_not_last_as_long_as_it_must() -> None:
    room = Room({"a": 3 * USD, "b": 3 * USD}, credit={"a": 6 * USD, "b": 6 * USD - 1, "c": 0}, credit_hours=2.0)
    assert [room.low(name) for name in "abcd"] == [False, True, False, False], "nothing runs at c, nobody knows d's"


def test_everything_is_given_back_before_the_cap_in_total_is_passed() -> None:
    held = Exposure(1000, 849, 3600)
    assert not Room({}, exposure=held).used_up(30.0)
    assert Room({}, exposure=held).used_up(31.5)
    assert not Room({}).used_up(1e9), "no cap, no end"


def test_one_lease_more_takes_its_room_everywhere() -> None:
    room = Room({"a": 5}, staying_micros_h=5, exposure=Exposure(1000, 0, 5, 2)).plus("b", 7).plus("a", 1)
    assert room.burns == {"a": 6, "b": 7}
    assert (room.burn, room.staying_micros_h) == (13, 13)
    assert room.exposure is not None
    assert room.exposure.pending_micros_h == 10


def test_what_is_left_is_told_in_dollars() -> None:
    spent = Room({"a": USD}, exposure=Exposure(USD, 2 * USD, 0), minimum_s=60)
    assert "$0.000000 are not committed, too little for a machine at $1.000000/h" in spent.why_not("a", USD)
    hourly = Room({"a": USD, "b": USD}, per_hour=2 * USD).why_not("a", USD // 2)
    assert hourly == "max_usd_per_hour 2.000000: $2.000000/h are rented and $0.500000/h would come on top"


def test_an_account_is_dry_when_it_does_not_last_until_it_is_looked_at_again() -> None:
    room = Room({"a": 3600}, credit={"a": 100, "b": 0})
    assert room.dry("a", 100)
    assert not room.dry("a", 99)
    assert not room.dry("b", 100)
    assert not room.dry("c", 100)
