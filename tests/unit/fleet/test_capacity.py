"""Eq. 2 with the numbers of the paper's ablation, and what it says when no fleet is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.capacity import bubble_ratio, feasible_period, minimum_capacity, plan

TIMES = st.floats(1e-3, 1e5)


@pytest.mark.parametrize(
    ("rollouts", "kappa", "t_train", "t_bcast", "mu_min"),
    [
        (128, 2, 1631.2, 1437.0, 0.140243),  # worked back from the ablation of the paper: 0.140 rollouts/s at S=3
        (2048, 2, 1631.2, 1437.0, 2.243892),
        (128, 2, 1631.2, 1830.0, 0.178721),
        (256, 1, 1631.2, 1437.0, 1.318229),
        (100, 4, 10.0, 0.0, 10.0),
        (100, 1, 10.0, 10.0, None),
        (100, 1, 10.0, 11.0, None),
        (100, 2, 10.0, 20.0, None),
    ],
)
def test_equation_two(rollouts: int, kappa: int, t_train: float, t_bcast: float, mu_min: float | None) -> None:
    found = minimum_capacity(rollouts, kappa, t_train, t_bcast)
    assert found == (None if mu_min is None else pytest.approx(mu_min, rel=1e-4))


@pytest.mark.parametrize(("kappa", "ratio"), [(2, 1.274), (3, 1.128)])
def test_a_slower_broadcast_costs_capacity_as_in_the_ablation(kappa: int, ratio: float) -> None:
    fast = minimum_capacity(128, kappa, 1631.2, 1437.0)
    slow = minimum_capacity(128, kappa, 1631.2, 1830.0)
    assert fast is not None
    assert slow is not None
    assert slow / fast == pytest.approx(ratio, abs=1e-3)
    # 8 machines of the full system become 10 (κ = 2) and 9 (κ = 3).
    assert round(8 * slow / fast) == {2: 10, 3: 9}[kappa]


def test_plan_is_equation_two_times_gamma() -> None:
    need = plan(rollouts=128, kappa=2, staleness=3, gamma=1.1, t_train=1631.2, t_bcast=1437.0)
    assert need.feasible
    assert need.mu_min == pytest.approx(0.140243, rel=1e-4)
    assert need.mu_target == pytest.approx(1.1 * 0.140243, rel=1e-4)
    assert need.explanation == ""


def test_infeasible_says_what_would_have_to_change() -> None:
    need = plan(rollouts=100, kappa=1, staleness=2, gamma=1.1, t_train=10.0, t_bcast=25.0)
    assert not need.feasible
    assert need.mu_min is None
    assert need.mu_target == pytest.approx(11.0), "it still serves what the learner consumes"
    assert "infeasible" in need.explanation
    assert "publish_period 3 with staleness_budget ≥ 4" in need.explanation
    assert "a broadcast below 10 s" in need.explanation


def test_infeasible_within_the_staleness_budget_asks_for_the_period_only() -> None:
    need = plan(rollouts=100, kappa=1, staleness=4, gamma=1.0, t_train=10.0, t_bcast=25.0)
    assert "publish_period 3 would be feasible within staleness_budget 4" in need.explanation


def test_the_least_staleness_budget_is_not_told_to_do_with_a_longer_period() -> None:
    need = plan(rollouts=100, kappa=1, staleness=1, gamma=1.0, t_train=10.0, t_bcast=15.0)
    assert "publish_period 2 with staleness_budget ≥ 3" in need.explanation


@given(t_train=TIMES, t_bcast=st.floats(0, 1e6))
def test_feasible_period_is_the_smallest_that_is_feasible(t_train: float, t_bcast: float) -> None:
    period = feasible_period(t_train, t_bcast)
    assert minimum_capacity(1, period, t_train, t_bcast) is not None
    assert period == 1 or minimum_capacity(1, period - 1, t_train, t_bcast) is None


@given(rollouts=st.integers(1, 10**6), kappa=st.integers(1, 50), t_train=TIMES, t_bcast=TIMES, gamma=st.floats(1, 10))
def test_target_never_below_consumption_and_monotone(
    rollouts: int, kappa: int, t_train: float, t_bcast: float, gamma: float
) -> None:
    def target(kappa: int, t_bcast: float) -> tuple[bool, float]:
        need = plan(rollouts=rollouts, kappa=kappa, staleness=kappa + 1, gamma=gamma, t_train=t_train, t_bcast=t_bcast)
        return need.feasible, need.mu_target

    feasible, mu = target(kappa, t_bcast)
    assert mu >= gamma * rollouts / t_train * (1 - 1e-9)
    if feasible:
        assert target(kappa + 1, t_bcast)[1] <= mu * (1 + 1e-9), "publishing less often needs less"
        assert target(kappa, t_bcast * 0.5)[1] <= mu * (1 + 1e-9), "a faster broadcast needs less"


def test_bubble_ratio() -> None:
    assert bubble_ratio(0.0, 0.0) is None
    assert bubble_ratio(1.0, 3.0) == 0.25
    assert bubble_ratio(0.0, 3.0) == 0.0
    assert bubble_ratio(0.125, 0.375) == 0.25, "of the shortest steps, too"
