"""The budget is a promise: simulated with random prices, it is never broken."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.fleet.budget import Exposure, can_rent, must_wind_down, spare_rate
from app.fleet.money import queue_s

HOUR = 3600


@pytest.mark.parametrize(
    ("exposure", "price", "minimum_s", "allowed"),
    [
        (Exposure(1000, 0, 0), 10_000, 240.0, True),  # 10_000 × 360 s = 1000
        (Exposure(999, 0, 0), 10_000, 240.0, False),
        (Exposure(1000, 1, 0), 10_000, 240.0, False),
        (Exposure(1000, 0, 0, pending_micros_h=1), 10_000, 240.0, False),
        (Exposure(0, 0, 0), 1, 0.0, False),
        (Exposure(100, 200, 0), 0, 0.0, False),
    ],
)
def test_can_rent(exposure: Exposure, price: int, minimum_s: float, allowed: bool) -> None:
    assert can_rent(exposure, price, minimum_s) is allowed


def test_what_is_paid_once_is_paid_before_the_first_second() -> None:
    assert can_rent(Exposure(1100, 0, 0), 10_000, 240.0, once=100)
    assert not can_rent(Exposure(1099, 0, 0), 10_000, 240.0, once=100)


@pytest.mark.parametrize(
    ("exposure", "due"),
    [
        (Exposure(1000, 1000, 0), False),  # nothing runs, nothing to wind down
        (Exposure(1000, 0, 3600), False),
        (Exposure(1000, 849, 3600), False),  # 120 kept back, 31 left, 30 burn until the margin ends
        (Exposure(1000, 850, 3600), True),
        (Exposure(1000, 849, 3600, pending_micros_h=1), True),
        (Exposure(1000, 1000, 0, pending_micros_h=1), True),  # unknown, but it may burn
    ],
)
def test_must_wind_down(exposure: Exposure, due: bool) -> None:
    assert must_wind_down(exposure, 30.0) is due


def test_what_was_asked_for_and_what_nobody_saw_yet_is_committed_with_the_way_down() -> None:
    held = Exposure(10_000, 1000, 3600, 1800, wind_down_s=60.0, unseen=7)
    assert (held.wind_down, held.committed, held.remaining) == (90, 1097, 8903)
    assert Exposure(10_000, 0, 1).wind_down == 1, "rounded up"


def test_rates_rise_no_further_than_all_others_leave_room_for() -> None:
    # 3600 of 3600 a second until its minimum of 60 s, and 40 s to wind down.
    held = Exposure(1000, 0, 1800, 1800, wind_down_s=40.0)
    assert spare_rate(held, 60.0) == 32_400
    assert spare_rate(Exposure(100, 0, 3600, wind_down_s=40.0), 60.0) == 0
    assert spare_rate(Exposure(99, 0, 3600, wind_down_s=40.0), 60.0) == 0


@given(
    budget=st.integers(1, 10**8),
    spent=st.integers(0, 10**8),
    burn=st.integers(0, 10**8),
    pending=st.integers(0, 10**8),
    price=st.integers(20_000, 10**7),
    minimum=st.floats(30, 3600),
)
def test_what_was_just_rented_does_not_end_the_job(
    budget: int, spent: int, burn: int, pending: int, price: int, minimum: float
) -> None:
    """Renting with the last dollars must not bring the end about: a lease that may be rented may live its minimum."""
    before = Exposure(budget, spent, burn, pending)
    if can_rent(before, price, minimum + 1):
        after = Exposure(budget, spent, burn + price, pending)
        later = Exposure(budget, spent + (burn + pending + price) * int(minimum - 30) // HOUR, burn + price, pending)
        assert not must_wind_down(after, 30.0)
        assert not must_wind_down(later, 30.0)


@given(seed=st.integers(0, 2**32), budget=st.integers(100, 5_000_000))
@example(seed=0, budget=1)
def test_the_promise_holds_in_simulation(seed: int, budget: int) -> None:
    """Random market, random rents, random losses: at the end, wound down, never a micro-dollar over."""
    rng = random.Random(seed)
    tick, wind_down_s, minimum_s = 10, 120, 120
    leases: list[int] = []
    spent_h = 0  # micro-dollars × seconds per hour: exact
    for _ in range(2000):
        exposure = Exposure(budget, -(-spent_h // HOUR), sum(leases), 0, wind_down_s)
        if must_wind_down(exposure, 3 * tick):
            break
        for _ in range(rng.randint(0, 3)):
            price = rng.randint(1_000, 2_000_000)
            held = Exposure(budget, -(-spent_h // HOUR), sum(leases), 0, wind_down_s)
            if can_rent(held, price, minimum_s):
                leases.append(price)
        if leases and rng.random() < 0.02:
            leases.pop(rng.randrange(len(leases)))
        spent_h += sum(leases) * tick
        committed = spent_h + sum(leases) * wind_down_s
        assert committed <= budget * HOUR
    # All leases run to the very end of the wind-down.
    assert spent_h + sum(leases) * wind_down_s <= budget * HOUR


@given(
    burn=st.integers(1, 10**7),
    jump=st.floats(1.0, (120 + 30) / (120 + 10)),
    spent=st.integers(0, 10**6),
    budget=st.integers(1, 10**7),
)
def test_a_price_that_rises_within_the_margin_breaks_nothing(burn: int, jump: float, spent: int, budget: int) -> None:
    """A rise of 15 % between two ticks is covered by the margin of three ticks."""
    now = Exposure(budget, spent, burn)
    if not must_wind_down(now, 30.0):
        assert spent * HOUR + burn * jump * (10 + 120) <= budget * HOUR


@given(
    budget=st.integers(0, 10**8), spent=st.integers(0, 10**8), burn=st.integers(0, 10**7), minimum=st.floats(1, 3600)
)
def test_rates_rise_as_far_as_the_promise_holds_and_no_further(
    budget: int, spent: int, burn: int, minimum: float
) -> None:
    exposure = Exposure(budget, spent, burn)
    spare = spare_rate(exposure, minimum)

    def left(more: int) -> float:
        risen = replace(exposure, burn_micros_h=burn + more)
        return risen.remaining - (burn + more) * minimum / 3600

    assert spare >= 0
    assert spare == 0 or left(spare) >= -1
    assert left(spare + 1) < 1


@given(n=st.integers(1, 300), m=st.integers(0, 50), each=st.floats(0, 10))
def test_leases_that_are_given_back_one_by_one_wait_for_each_other(n: int, m: int, each: float) -> None:
    """As long as it takes, counted out: the i-th of a provider's n is destroyed after i intervals."""
    waits = [i * each for i in range(n)] + [0.0] * m
    found = queue_s(["slow"] * n + ["quick"] * m, {"slow": each})
    assert found == pytest.approx(sum(waits) / len(waits))
    assert queue_s([], {"slow": each}) == 0.0
