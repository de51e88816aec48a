"""Money is exact however an interval is split."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet import ledger

INT64 = 2**63
NS = 10**9


@pytest.mark.parametrize(
    ("rate", "seconds", "micros"),
    [(3_600_000, 1.0, 1000), (350_000, 3600.0, 350_000), (1, 3599.999, 0), (1, 3600.0, 1), (10**6, -5.0, 0)],
)
def test_rent(rate: int, seconds: float, micros: int) -> None:
    assert ledger.rent(rate, seconds, 0).micros == micros


def test_disk_month_is_720_hours() -> None:
    assert ledger.disk(150_000, 16.0, 720 * 3600.0, 0) == ledger.Amount(150_000 * 16, 0)


def test_traffic_is_per_decimal_gigabyte() -> None:
    assert ledger.traffic(20_000, 1_500_000_000, 0) == ledger.Amount(30_000, 0)


@given(
    rate=st.integers(0, 10**9),
    parts=st.lists(st.integers(0, 10**14), min_size=1, max_size=30),
)
def test_rent_is_exact_under_any_split(rate: int, parts: list[int]) -> None:
    total, carry = 0, 0
    for nanoseconds in parts:
        amount = ledger.rent(rate, nanoseconds / NS, carry)
        total, carry = total + amount.micros, amount.carry
        assert 0 <= carry < INT64
    assert total == int(Fraction(rate * sum(parts), 3600 * NS)), "the true amount rounded down once"


@given(
    price=st.integers(0, 10**8),
    tenths=st.integers(80, 100_000),
    parts=st.lists(st.integers(0, 10**14), min_size=1, max_size=30),
)
def test_disk_is_exact_under_any_split(price: int, tenths: int, parts: list[int]) -> None:
    total, carry = 0, 0
    for nanoseconds in parts:
        amount = ledger.disk(price, tenths / 10, nanoseconds / NS, carry)
        total, carry = total + amount.micros, amount.carry
        assert 0 <= carry < INT64
    assert total == int(Fraction(price * tenths * sum(parts), 10 * 720 * 3600 * NS))


@given(price=st.integers(0, 10**8), parts=st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_traffic_is_exact_under_any_split(price: int, parts: list[int]) -> None:
    total, carry = 0, 0
    for size in parts:
        amount = ledger.traffic(price, size, carry)
        total, carry = total + amount.micros, amount.carry
    assert total == price * sum(parts) // 10**9


@given(cuts=st.lists(st.floats(0, 86_400), max_size=200), rate=st.integers(10_000, 10**7))
def test_clock_readings_do_not_drift(cuts: list[float], rate: int) -> None:
    """Intervals closed at odd moments of a real clock, sub-millisecond ones too, add up to the whole day."""
    begin = 1_790_000_000.123456
    moments = [begin, *sorted(begin + cut for cut in cuts), begin + 86_400]
    total, carry = 0, 0
    for start, end in itertools.pairwise(moments):
        amount = ledger.rent(rate, end - start, carry)
        total, carry = total + amount.micros, amount.carry
    true = Fraction(rate) * (Fraction(moments[-1]) - Fraction(begin)) / 3600
    assert abs(total - true) <= 1


def test_slices_shorter_than_a_millisecond_are_paid_for() -> None:
    total, carry = 0, 0
    for _ in range(10_000):
        amount = ledger.rent(3_600_000_000, 0.0001, carry)
        total, carry = total + amount.micros, amount.carry
    assert total == 1_000_000


def test_a_change_of_rate_keeps_the_carry() -> None:
    first = ledger.rent(1, 1800.0, 0)
    second = ledger.rent(3, 600.0, first.carry)
    assert (first.micros, second.micros, second.carry) == (0, 1, 0)
