"""When a job will end and what it will have cost, from what it did lately. Pure.

Invariant: low ≤ cost ≤ high; nothing is forecast that nothing was measured for: the basis says what is missing.

The centre supposes that steps take what they lately took and that the fleet burns what it burns now. The range adds
the spread of single steps (it averages out over many), the error of their mean (it does not), and what the fleet
burned at its cheapest and dearest lately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

RECENT = 30
"""Steps that are looked at."""
MIN_INTERVALS = 3
"""Fewer say nothing about the next ones."""
OUTLIER = 5.0
"""An interval above this multiple of the median held a pause or a repair: it is not what a step takes."""
SIGMAS = 1.645
"""Nine of ten lie within the range, if steps go on like this."""
BACK = 0.98
"""A forecast is within the budget again below this share of it, so that one on the edge is not told at each step."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A step that was done: when, and what the job had cost by then (micro-dollars)."""

    at: float
    spent: int


@dataclass(frozen=True, slots=True)
class Course:
    """Where a job stands."""

    now: float
    spent: int
    """Micro-dollars, open amounts and those not seen yet included."""
    burn_micros_h: int
    """What all that is rented costs per hour now, unknown outcomes included."""
    wind_down: int
    """Micro-dollars that ending in order costs."""
    budget: int
    step: int
    stop_steps: int | None
    stop_in_s: float | None
    """Seconds until the job's hours are over; None without such a limit."""
    marks: Sequence[Mark]
    """The last steps, oldest first."""
    paused: bool = False
    over_at: float | None = None
    """When it ended; None while it goes on."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Moments are seconds since the epoch, money is micro-dollars; None where nothing can be said."""

    ends_at: float | None
    """When the stop rule is met, if money lasts."""
    cost: int | None
    low: int | None
    high: int | None
    budget_lasts_until: float | None
    """When the budget is used up, if what is rented now goes on burning; None while nothing burns."""
    basis: str
    to_stop_rule: bool = False
    """Whether the cost is that of reaching the stop rule, and not only what the budget allows."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """Recent steps: seconds of each and what the fleet burned over them, micro-dollars an hour."""

    seconds: tuple[float, ...]
    burns: tuple[float, ...]

    def total(self, steps: int) -> tuple[float, float, float]:
        """Seconds that so many further steps take: expected, least, most."""
        mean, spread = fmean(self.seconds), stdev(self.seconds) if len(self.seconds) > 1 else 0.0
        error = SIGMAS * spread * math.sqrt(steps + steps**2 / len(self.seconds))
        return steps * mean, max(steps * min(self.seconds), steps * mean - error), steps * mean + error


def forecast(course: Course) -> Forecast:
    """What to expect of the job."""
    if course.over_at is not None:
        return Forecast(course.over_at, course.spent, course.spent, course.spent, None, "the job is over")
    lasts = _lasts(course)
    pace = _pace(course.marks)
    left = None if course.stop_steps is None else max(0, course.stop_steps - course.step)
    if course.paused:
        return Forecast(None, None, None, None, lasts, "the job is paused")
    if left is not None and left > 0 and pace is None and course.stop_in_s is None:
        have = max(0, len(course.marks) - 1)
        return Forecast(None, None, None, None, lasts, f"{have} of the {MIN_INTERVALS} steps that a forecast needs")
    if left is None and course.stop_in_s is None:
        basis = "only the reward ends the job: it goes on until then, at most until its budget is used up"
        return Forecast(None, None, course.spent, max(course.spent, course.budget), lasts, basis)
    return _to_the_stop_rule(course, pace, left, lasts)


def _to_the_stop_rule(course: Course, pace: _Pace | None, left: int | None, lasts: float | None) -> Forecast:
    expected, least, most = (math.inf, math.inf, math.inf)
    basis = ""
    if left is not None and (pace is not None or left == 0):
        expected, least, most = pace.total(left) if pace is not None else (0.0, 0.0, 0.0)
        each = f" at {expected / left:.3g} s each (the last {len(pace.seconds)})" if left and pace else ""
        basis = f"{left} of {course.stop_steps} steps are left{each}"
    if course.stop_in_s is not None and course.stop_in_s < expected:
        basis = f"{course.stop_in_s / 3600:.3g} of its hours are left"
    limit = math.inf if course.stop_in_s is None else max(0.0, course.stop_in_s)
    expected, least, most = min(expected, limit), min(least, limit), min(most, limit)
    rate, cheap, dear = _burns(course, pace)
    return Forecast(
        ends_at=course.now + expected,
        cost=_cost(course, expected, rate),
        # At best everything is given back at once.
        low=min(_cost(course, expected, rate), _cost(course, least, cheap)) - course.wind_down,
        high=max(_cost(course, expected, rate), _cost(course, most, dear)),
        budget_lasts_until=lasts,
        basis=f"{basis}, ${rate / 1e6:.4g} an hour",
        to_stop_rule=True,
    )


def _cost(course: Course, seconds: float, burn: float) -> int:
    return course.spent + round(burn * seconds / 3600) + course.wind_down


def _burns(course: Course, pace: _Pace | None) -> tuple[float, float, float]:
    """Micro-dollars an hour: expected, cheapest, dearest. What burns now counts, unless nothing does for the moment."""
    recent = pace.burns if pace is not None else ()
    rate = float(course.burn_micros_h) or (fmean(recent) if recent else 0.0)
    if not recent:
        return rate, rate, rate
    ranked = sorted(recent)
    tenth = len(ranked) // 10
    return rate, min(rate, ranked[tenth]), max(rate, ranked[-1 - tenth])


def _pace(marks: Sequence[Mark]) -> _Pace | None:
    """Time and burn of the last steps, pauses left out; None while there are too few."""
    pairs = [(b.at - a.at, b.spent - a.spent) for a, b in pairwise(marks[-RECENT - 1 :]) if b.at > a.at]
    if len(pairs) < MIN_INTERVALS:
        return None
    usual = median(seconds for seconds, _ in pairs)
    kept = [(seconds, spent) for seconds, spent in pairs if seconds <= OUTLIER * usual]
    return _Pace(tuple(s for s, _ in kept), tuple(max(0.0, spent * 3600 / s) for s, spent in kept))


def _lasts(course: Course) -> float | None:
    """When spent plus winding down reach the budget."""
    if course.burn_micros_h <= 0:
        return None
    left = max(0, course.budget - course.spent - course.wind_down)
    return course.now + left * 3600 / course.burn_micros_h


def over_budget(expected: Forecast, budget: int, was_over: bool) -> bool:
    """Whether the job is now expected to cost more than its budget; unchanged while nothing can be said."""
    if not expected.to_stop_rule or expected.cost is None:
        return was_over
    return expected.cost > (budget * BACK if was_over else budget)
