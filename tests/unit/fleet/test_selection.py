"""When twins convict a node of choosing among its answers, and that they convict nobody else."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet.selection import (
    BETS,
    CERTAIN,
    DOUBT,
    EAGER,
    MARGIN,
    MOST,
    NEW,
    NOTHING,
    PER_VERSION,
    Comparison,
    compare,
    guilt,
    liars,
    said,
    share,
)

REWARDS = st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-50, 50)), min_size=2, max_size=8)


@lru_cache(None)
def counted(n: int, one: int, other: int, gap: int = 0) -> Comparison:
    """Of two groups of n with so many right answers."""
    return compare([1.0] * one + [0.0] * (n - one), [1.0] * other + [0.0] * (n - other), gap)


def right(rng: random.Random, n: int, p: float) -> int:
    return sum(rng.random() < p for _ in range(n))


def best(p: float, k: int) -> float:
    """Pass rate of who sends the best of k."""
    return 1 - (1 - p) ** k


def deals(rewards: list[float], count: int) -> list[tuple[list[float], list[float]]]:
    """All ways to deal rewards out to two groups."""
    chosen = itertools.combinations(range(len(rewards)), count)
    return [
        ([rewards[i] for i in mine], [r for i, r in enumerate(rewards) if i not in mine]) for mine in map(set, chosen)
    ]


@settings(deadline=None, max_examples=60)
@given(REWARDS, st.integers(0, 6), st.data())
def test_under_exchangeable_rewards_no_bet_wins_on_average(rewards: list[float], gap: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(rewards) - 1))
    found = [compare(one, other, gap) for one, other in deals(rewards, count)]
    for bet in range(len(BETS)):
        assert np.mean([math.exp(c.rise[bet]) for c in found]) <= 1 + 1e-9
        assert np.mean([math.exp(c.fall[bet]) for c in found]) <= 1 + 1e-9


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=4, max_size=8), st.integers(0, 3), st.floats(0, 1))
def test_nor_do_they_under_any_difference_within_the_margin(rewards: list[float], gap: int, part: float) -> None:
    margin = MARGIN + PER_VERSION * gap
    spread = float(np.std(rewards))
    if spread < 1e-6:
        return
    ways = deals(rewards, len(rewards) // 2)
    sums = [sum(one) - np.mean(rewards) * len(one) for one, _ in ways]
    for tilt, limit in ((part * margin, 1 + 1e-9), (margin, 1 + 1e-9)):
        weights = np.exp([tilt * s / spread for s in sums])
        for bet in range(len(BETS)):
            values = [math.exp(compare(one, other, gap).rise[bet]) for one, other in ways]
            assert np.average(values, weights=weights) <= limit


@given(REWARDS, REWARDS)
def test_what_one_group_rises_the_other_falls(one: list[float], other: list[float]) -> None:
    found, turned = compare(one, other, 0), compare(other, one, 0)
    assert found.rise == pytest.approx(turned.fall, abs=1e-7)
    assert found.turned == Comparison(found.fall, found.rise, first=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1.0] * 4, [1.0] * 4), ([0.0], [0.0]), ([], [1.0]), ([math.inf, 1.0], [0.0, 1.0]), ([1e300] * 3, [1e300] * 3)],
)
def test_what_says_nothing(one: list[float], other: list[float]) -> None:
    assert compare(one, other, 0) == NOTHING


def test_scale_and_offset_of_rewards_do_not_matter_and_large_ones_do_no_harm() -> None:
    one, other = [0.3, 0.9, 1.0, 0.2], [0.1, 0.4, 0.0, 0.2]
    usual = compare(one, other, 0).rise
    assert compare([1e300 * r for r in one], [1e300 * r for r in other], 0).rise == pytest.approx(usual)
    assert compare([r / 7 - 9 for r in one], [r / 7 - 9 for r in other], 0).rise == pytest.approx(usual)
    many = compare([1.0] * 1024, [0.0] * 1024, 0)
    assert many == compare([1.0] * MOST, [0.0] * MOST, 0)
    assert all(math.isfinite(x) for x in (*many.rise, *many.fall))


def test_versions_far_apart_say_less_and_in_the_end_nothing() -> None:
    found = [counted(8, 7, 2, gap).rise[-1] for gap in (0, 1, 4, 30)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 > found[-1] == 0.0


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_1000_comparisons_of_honest_nodes_convict_none(p: float) -> None:
    rng = random.Random(3)
    worst = -math.inf
    for _ in range(12):
        testimony: dict[str, list[Comparison]] = defaultdict(list)
        for number in range(1000):
            p_now = min(1.0, p + 0.1 * math.sin(number / 50))
            testimony[f"n{rng.randrange(7)}"].append(counted(8, right(rng, 8, p_now), right(rng, 8, p_now)))
            if number % 20 == 19:
                found = said(testimony)
                worst = max(worst, found.worst, found.doubt)
    assert worst < CERTAIN / 2


def test_nor_do_they_where_versions_drift_as_fast_as_a_quick_job_learns() -> None:
    """One node is always a version ahead of the others, by a factor of 1.2 to the odds."""
    rng = random.Random(4)
    testimony: dict[str, list[Comparison]] = defaultdict(list)
    for number in range(1000):
        testimony[f"n{number % 5}"].append(counted(8, right(rng, 8, 0.545), right(rng, 8, 0.5), 1))
    assert said(testimony).worst < 3


CHOICES = [
    # group, pass rate, best of, comparisons that suffice
    (4, 0.5, 2, 400), (8, 0.2, 2, 500), (8, 0.5, 2, 180), (8, 0.8, 2, 180), (16, 0.5, 2, 100),
    (4, 0.5, 4, 80), (8, 0.2, 4, 70), (8, 0.5, 4, 50), (8, 0.8, 4, 80), (16, 0.5, 4, 30),
]  # fmt: skip


@pytest.mark.parametrize(("n", "p", "k", "most"), CHOICES)
@pytest.mark.parametrize("what", ["best", "worst"])
def test_who_chooses_by_reward_is_convicted_within_a_bound(n: int, p: float, k: int, most: int, what: str) -> None:
    # The worst of k at a pass rate of p is the best of k at 1 − p, turned round.
    rng = random.Random(5)
    for _ in range(5):
        testimony: dict[str, list[Comparison]] = defaultdict(list)
        for _ in range(most):
            chosen, honest = right(rng, n, best(p, k)), right(rng, n, p)
            if what == "worst":
                chosen, honest = n - chosen, n - honest
            testimony[f"n{rng.randrange(7)}"].append(counted(n, chosen, honest))
        found = said(testimony)
        assert ("higher" if what == "best" else "lower") in guilt(found)
        assert (found.higher > CERTAIN, found.lower > CERTAIN) == (what == "best", what == "worst")


def fleet(rng: random.Random, rates: list[float], comparisons: int, n: int = 8) -> dict[int, str]:
    """Who of a fleet is convicted, each with its own pass rate; what convicts say is forgotten."""
    found: dict[int, dict[str, list[Comparison]]] = {i: defaultdict(list) for i in range(len(rates))}
    convicted: dict[int, str] = {}
    for _ in range(comparisons):
        left = [i for i in range(len(rates)) if i not in convicted]
        one, other = rng.sample(left, 2)
        result = counted(n, right(rng, n, rates[one]), right(rng, n, rates[other]))
        found[one][str(other)].append(result)
        found[other][str(one)].append(result.turned)
        for node in sorted((one, other), key=lambda i: -said(found[i]).worst):
            why = guilt(said(found[node]))
            if why:
                convicted[node] = why
                for testimony in found.values():
                    testimony.pop(str(node), None)
    return convicted


@pytest.mark.parametrize("q", [best(0.5, 2), best(0.5, 4), 0.25])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_of_a_fleet_the_one_who_chooses_is_convicted_and_nobody_else(size: int, q: float) -> None:
    assert set(fleet(random.Random(6), [q] + [0.5] * (size - 1), 120 * size)) == {0}


def test_a_third_of_a_fleet_that_chooses_alike_is_convicted_and_nobody_else() -> None:
    rates = [best(0.5, 4)] * 2 + [0.5] * 5
    assert set(fleet(random.Random(7), rates, 500)) == {0, 1}


def test_one_partner_alone_convicts_nobody() -> None:
    one = {"n1": [counted(16, 16, 0)] * 1000}
    assert guilt(said(one)) == ""
    assert said(one).doubt > CERTAIN
    assert "higher" in guilt(said({**one, "n2": [counted(16, 16, 0)] * 5}))
    assert guilt(said({})) == ""


LOGS = st.tuples(*[st.floats(-50, 1e6)] * len(BETS))
HONEST = st.tuples(*[st.floats(-3, 0)] * len(BETS))


@settings(deadline=None)
@given(st.integers(1, 12), st.data())
def test_as_many_liars_as_are_allowed_for_convict_nobody(partners: int, data: st.DataObject) -> None:
    testimony = {}
    for number in range(partners):
        logs = data.draw(LOGS if number < liars(partners) else HONEST)
        testimony[str(number)] = [Comparison(logs, logs)] * data.draw(st.integers(1, 3))
    assert said(testimony).worst <= 1e-9
    assert guilt(said(testimony)) == ""


def test_who_is_honest_wherever_a_twin_may_be_suspected_is_convicted_all_the_same() -> None:
    rng = random.Random(8)
    testimony: dict[str, list[Comparison]] = defaultdict(list)
    for number in range(400):
        first = number % 2 == 0
        found = counted(8, right(rng, 8, best(0.5, 2) if first else 0.5), right(rng, 8, 0.5))
        testimony[f"n{rng.randrange(7)}"].append(replace(found, first=first))
    assert "higher" in guilt(said(testimony))


def test_friends_cannot_outweigh_the_others() -> None:
    against = {f"n{i}": [counted(8, 8, 3)] * 12 for i in range(6)}
    friend = Comparison((-1e6,) * len(BETS), (-1e6,) * len(BETS))
    assert guilt(said({**against, "friend": [friend]}))


@pytest.mark.parametrize(
    ("base", "twins", "doubt", "expected"),
    [
        (0.02, 0, 0.0, 0.02 * EAGER), (0.02, NEW - 1, 0.0, 0.02 * EAGER), (0.02, NEW, 0.0, 0.02),
        (0.02, 1000, DOUBT, 0.02 * EAGER), (0.5, 0, 0.0, 1.0), (0.0, 0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_new_and_doubtful_nodes_have_more_twins(base: float, twins: int, doubt: float, expected: float) -> None:
    assert share(base, twins=twins, doubt=doubt) == pytest.approx(expected)
