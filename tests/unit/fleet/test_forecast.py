"""Forecasts: what steady, noisy and paused jobs are told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.forecast import Course, Forecast, Mark, forecast, over_budget

NOW = 1_000_000.0
USD = 1_000_000


def steady(steps: int, *, seconds: float = 10.0, burn: int = USD, stop: int | None = 100, **changes: object) -> Course:
    """A job that made `steps` steps of `seconds` each at one burn, micro-dollars an hour."""
    each = round(burn * seconds / 3600)
    marks = [Mark(NOW - (steps - i) * seconds, i * each) for i in range(1, steps + 1)]
    course = Course(
        now=NOW, spent=steps * each, burn_micros_h=burn, wind_down=0, budget=50 * USD, step=steps, stop_steps=stop,
        stop_in_s=None, marks=marks,
    )  # fmt: skip
    return replace(course, **changes)  # type: ignore[arg-type]


def test_a_steady_job_ends_when_its_steps_are_done_and_costs_their_time() -> None:
    got = forecast(steady(40))
    assert got.ends_at == pytest.approx(NOW + 600)
    assert got.cost == pytest.approx(1000 / 3600 * USD, rel=1e-3)
    assert got.low == pytest.approx(got.cost, rel=1e-3)
    assert got.high == pytest.approx(got.cost, rel=1e-3)
    assert got.budget_lasts_until == pytest.approx(NOW + (50 - 400 / 3600) * 3600)
    assert got.basis == "60 of 100 steps are left at 10 s each (the last 30), $1 an hour"


@pytest.mark.parametrize(
    ("course", "basis"),
    [
        (steady(3), "2 of the 3 steps that a forecast needs"),
        (steady(0), "0 of the 3 steps that a forecast needs"),
        (steady(10, paused=True), "the job is paused"),
        (steady(10, stop=None), "only the reward ends the job"),
    ],
)
def test_what_is_not_known_is_not_made_up(course: Course, basis: str) -> None:
    got = forecast(course)
    assert got.ends_at is None
    assert got.cost is None
    assert got.basis.startswith(basis)
    assert not over_budget(got, 0, was_over=False)
    assert over_budget(got, 10**12, was_over=True)


def test_a_job_that_only_a_reward_ends_lies_between_what_it_cost_and_its_budget() -> None:
    course = steady(10, stop=None)
    got = forecast(course)
    assert (got.low, got.high) == (course.spent, course.budget)


def test_a_job_that_is_over_costs_what_it_cost() -> None:
    got = forecast(steady(10, over_at=NOW - 5))
    assert (got.ends_at, got.cost, got.low, got.high) == (NOW - 5, 27_780, 27_780, 27_780)


def test_hours_end_a_job_before_its_steps() -> None:
    got = forecast(steady(40, stop_in_s=60.0))
    assert got.ends_at == NOW + 60
    assert got.cost == pytest.approx(460 / 3600 * USD, rel=1e-3)
    assert "hours are left" in got.basis


def test_a_pause_is_not_what_a_step_takes() -> None:
    course = steady(20)
    late = [replace(m, at=m.at - 86_400) if i < 10 else m for i, m in enumerate(course.marks)]
    assert forecast(replace(course, marks=late)).ends_at == pytest.approx(NOW + 800)


def test_what_burns_now_counts_and_the_past_widens_the_range() -> None:
    cheap = steady(40)
    got = forecast(replace(cheap, burn_micros_h=3 * USD))
    assert got.cost is not None
    assert got.low is not None
    assert got.cost == pytest.approx(cheap.spent + 600 / 3600 * 3 * USD, rel=1e-3)
    assert got.low == pytest.approx(cheap.spent + 600 / 3600 * USD, rel=1e-3)


def test_an_empty_fleet_is_expected_to_come_back_at_its_usual_price() -> None:
    got = forecast(steady(40, burn_micros_h=0))
    assert got.cost == pytest.approx(1000 / 3600 * USD, rel=1e-2)
    assert got.budget_lasts_until is None


@given(st.integers(0, 10**6))
def test_the_range_holds_most_of_what_noisy_jobs_come_to_cost(seed: int) -> None:
    """Not each: nine of ten are promised, here a wide margin is asked of any."""
    rng = random.Random(seed)

    def step() -> float:
        return rng.uniform(5, 15)

    marks, at, spent = [], 0.0, 0
    for _ in range(30):
        seconds = step()
        at, spent = at + seconds, spent + round(seconds / 3600 * USD)
        marks.append(Mark(at, spent))
    got = forecast(Course(at, spent, USD, 0, 50 * USD, 30, 100, None, marks))
    truth = spent + round(sum(step() for _ in range(70)) / 3600 * USD)
    assert got.low is not None
    assert got.cost is not None
    assert got.high is not None
    assert got.low <= got.cost <= got.high
    width = got.high - got.low
    assert got.low - width <= truth <= got.high + width


def test_nine_of_ten_noisy_jobs_end_within_the_range() -> None:
    rng = random.Random(7)
    inside = 0
    for _ in range(400):
        times = [rng.uniform(5, 15) for _ in range(100)]
        marks, at, spent = [], 0.0, 0
        for seconds in times[:30]:
            at, spent = at + seconds, spent + round(seconds / 3600 * USD)
            marks.append(Mark(at, spent))
        got = forecast(Course(at, spent, USD, 0, 50 * USD, 30, 100, None, marks))
        assert got.low is not None
        assert got.high is not None
        inside += got.low <= spent + round(sum(times[30:]) / 3600 * USD) <= got.high
    assert 0.85 <= inside / 400 <= 0.97


@given(
    st.lists(st.tuples(st.floats(0.01, 1e4), st.integers(0, 10**7)), max_size=40),
    st.integers(0, 10**8), st.integers(0, 500), st.one_of(st.none(), st.integers(1, 500)),
    st.one_of(st.none(), st.floats(-10, 1e6)), st.booleans(),
)  # fmt: skip
def test_any_course_has_an_ordered_forecast(
    steps: list[tuple[float, int]], burn: int, step: int, stop: int | None, hours: float | None, paused: bool
) -> None:
    marks, at, spent = [], NOW, 0
    for seconds, cost in steps:
        at, spent = at + seconds, spent + cost
        marks.append(Mark(at, spent))
    course = Course(at, spent, burn, burn // 30, 50 * USD, step, stop, hours, marks, paused)
    got = forecast(course)
    assert got.basis
    if got.to_stop_rule:
        assert got.ends_at is not None
        assert got.ends_at >= course.now
        assert course.spent <= (got.low or 0) <= (got.cost or 0) <= (got.high or 0)


def test_the_edge_of_the_budget_is_told_once() -> None:
    def at(cost: int) -> Forecast:
        return Forecast(NOW, cost, cost, cost, None, "", to_stop_rule=True)

    over, told = False, []
    for cost in (900, 1001, 999, 1002, 985, 1010, 970, 990, 1000, 1001):
        now_over = over_budget(at(cost), 1000, over)
        if now_over != over:
            told.append((cost, now_over))
        over = now_over
    assert told == [(1001, True), (970, False), (1001, True)]
