from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rollout_agent.measure import BUSY_WINDOW_S, MAX_ITEMS, MIN_ITEMS, BatchSizer, Meter, Rates, next_items


@pytest.mark.parametrize(
    ("items", "got", "seconds", "gain", "expected"),
    [
        (1, 1, 0.01, None, 2),
        (16, 16, 0.49, 1.0, 32),
        (64, 64, 0.1, 2.0, 64),
        (16, 4, 0.1, None, 16),
        (16, 16, 0.5, 1.0, 16),
        (16, 16, 1.0, 1.0, 16),
        (16, 16, 1.5, 1.1, 8),
        (16, 16, 20.0, 1.9, 32),
        (1, 1, 20.0, None, 2),
        (1, 1, 60.0, 1.0, 1),
        (64, 5, 3.0, None, 4),
        (16, 1, 3.0, None, 1),
    ],
)
def test_batches_aim_at_half_a_second_to_a_second(
    items: int, got: int, seconds: float, gain: float | None, expected: int
) -> None:
    assert next_items(items, got, seconds, gain) == expected


def settle(seconds: Callable[[int], float], batches: int = 30) -> list[int]:
    """The sizes that a machine is asked for which takes `seconds(groups)`."""
    sizer, sizes = BatchSizer(), []
    for _ in range(batches):
        sizes.append(sizer.items)
        sizer.done(sizer.items, seconds(sizer.items))
    return sizes


@given(st.floats(0.01, 30))
def test_a_machine_that_gains_nothing_by_batching_settles_in_the_window(seconds_per_group: float) -> None:
    last = settle(lambda groups: groups * seconds_per_group)[-1]
    took = last * seconds_per_group
    assert 0.5 <= took <= 1.0 or (last == MIN_ITEMS and took > 0.5) or (last == MAX_ITEMS and took <= 1.0)


def test_long_completions_are_batched_as_long_as_it_pays() -> None:
    # 20 s of token-by-token latency, whatever the batch; from 16 groups on the machine is saturated.
    sizes = settle(lambda groups: 20.0 * max(1.0, groups / 16))
    assert sizes[-10:] == [16] * 10
    assert sizes.count(32) == 1, "what did not pay is not tried again and again"


def test_what_exceeded_the_memory_is_not_asked_for_again() -> None:
    sizer = BatchSizer()
    for _ in range(10):
        sizer.done(sizer.items, 0.01)
    assert sizer.items == MAX_ITEMS
    sizer.out_of_memory()
    sizes = []
    for _ in range(10):
        sizes.append(sizer.items)
        sizer.done(sizer.items, 0.01)
    assert set(sizes) == {MAX_ITEMS // 2}


def grown(sizer: BatchSizer, seconds: Callable[[int], float], batches: int = 20) -> list[int]:
    sizes = []
    for _ in range(batches):
        sizer.done(sizer.items, seconds(sizer.items))
        sizes.append(sizer.items)
    return sizes


def test_a_machine_that_ran_out_of_memory_grows_again_to_what_it_could_hold() -> None:
    sizer = BatchSizer()
    assert grown(sizer, lambda _: 0.01)[-1] == MAX_ITEMS
    sizer.out_of_memory()
    assert grown(sizer, lambda groups: 0.7 * groups)[-1] == 1
    assert max(grown(sizer, lambda _: 0.01)) == MAX_ITEMS // 2


def test_what_did_not_pay_for_long_completions_is_tried_again_when_they_are_short() -> None:
    sizer = BatchSizer()
    assert grown(sizer, lambda groups: 20.0 * max(1.0, groups / 4))[-1] == 4
    assert grown(sizer, lambda _: 0.01)[-1] == MAX_ITEMS


def test_a_batch_that_is_slower_than_two_halves_is_not_doubled_once_more() -> None:
    assert max(grown(BatchSizer(), lambda groups: 0.05 * groups if groups <= 8 else 0.2 * groups)) == 16


@given(st.lists(st.tuples(st.integers(1, MAX_ITEMS), st.floats(0, 1000), st.booleans())))
def test_the_size_is_always_allowed(batches: list[tuple[int, float, bool]]) -> None:
    sizer = BatchSizer()
    for got, seconds, fails in batches:
        if fails:
            sizer.out_of_memory()
        else:
            sizer.done(min(got, sizer.items), seconds)
        assert MIN_ITEMS <= sizer.items <= MAX_ITEMS


def test_there_are_no_rates_before_the_first_batch() -> None:
    assert Meter().rates is None
    assert Meter().busy_share(5.0) is None


def test_rates_count_generating_time_only() -> None:
    meter = Meter()
    for began in (0.0, 100.0, 200.0):
        meter.begin(began)
        meter.end(began, began + 2.0, rollouts=20, tokens=100)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(10)
    assert meter.rates.tokens_per_s == pytest.approx(50)


def test_rates_forget_with_a_half_life_of_four_batches() -> None:
    meter = Meter()
    for n in range(100):
        meter.begin(n)
        meter.end(n, n + 1.0, rollouts=10, tokens=10)
    for n in range(100, 104):
        meter.begin(n)
        meter.end(n, n + 1.0, rollouts=20, tokens=10)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(15, abs=0.01)


def test_a_failed_batch_is_busy_time_but_no_throughput() -> None:
    meter = Meter()
    meter.end(-5.0, 0.0, rollouts=10, tokens=10)
    meter.begin(0.0)
    meter.end(0.0, 1.0, rollouts=10, tokens=10)
    meter.begin(1.0)
    meter.end(1.0, 9.0)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(10)
    assert meter.busy_share(9.0) == pytest.approx(1.0)


def test_busy_share_is_of_the_last_half_minute_and_counts_the_running_batch() -> None:
    meter = Meter()
    meter.begin(10.0)
    meter.end(10.0, 12.0, rollouts=1, tokens=1)
    assert meter.busy_share(14.0) == pytest.approx(0.5)
    assert meter.busy_share(10.0 + BUSY_WINDOW_S) == pytest.approx(2 / BUSY_WINDOW_S)
    assert meter.busy_share(100.0) == pytest.approx(0.0)
    meter.begin(100.0)
    assert meter.busy_share(115.0) == pytest.approx(15 / BUSY_WINDOW_S)


def test_the_first_batch_pays_for_warm_up_and_is_not_counted() -> None:
    meter = Meter()
    meter.begin(0.0)
    meter.end(0.0, 8.0, rollouts=8, tokens=40)
    assert meter.rates is None
    meter.begin(8.0)
    meter.end(8.0, 9.0, rollouts=100, tokens=500)
    assert meter.rates == Rates(100.0, 500.0)


def test_what_is_usual_is_the_mean_of_the_last_half_minute() -> None:
    meter = Meter()
    assert meter.usual_s is None
    for began, ended in ((0.0, 9.0), (20.0, 22.0), (40.0, 44.0)):
        meter.begin(began)
        meter.end(began, ended, rollouts=1, tokens=1)
    assert meter.usual_s == pytest.approx(3.0)


def test_a_batch_is_as_busy_as_the_part_of_it_that_is_within_the_half_minute() -> None:
    meter = Meter()
    meter.begin(0.0)
    assert meter.busy_share(0.0) is None
    meter.end(0.0, 20.0, rollouts=1, tokens=1)
    assert meter.busy_share(10.0 + BUSY_WINDOW_S) == pytest.approx(10 / BUSY_WINDOW_S)
