"""Advantages against slow versions written from the formulas, and the cut into micro-batches."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.learner.advantages import batch_advantages, group_advantages
from app.learner.microbatch import split, token_lags
from app.protocol.trajectory import Rollout

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)


@given(REWARDS)
def test_advantages_are_the_formula(rewards: list[float]):
    mean = sum(rewards) / len(rewards)
    deviation = statistics.stdev(rewards)
    slow = [0.0 if len(set(rewards)) == 1 else (r - mean) / (deviation + 1e-4) for r in rewards]
    assert group_advantages(rewards) == pytest.approx(slow, rel=1e-6, abs=1e-6)


@given(st.floats(-5, 5), st.integers(1, 20))
def test_equal_rewards_give_exactly_nothing(reward: float, n: int):
    assert group_advantages([reward] * n) == [0.0] * n


@given(st.lists(REWARDS, min_size=1, max_size=5))
def test_advantages_without_a_deviation_and_with_that_of_the_step(groups: list[list[float]]):
    everything = [r for rewards in groups for r in rewards]
    deviation = statistics.stdev(everything) + 1e-4
    plain, scaled = batch_advantages(groups, "none"), batch_advantages(groups, "batch")
    for rewards, one, other in zip(groups, plain, scaled, strict=True):
        mean = sum(rewards) / len(rewards)
        slow = [0.0 if len(set(rewards)) == 1 else r - mean for r in rewards]
        assert one == pytest.approx(slow, rel=1e-6, abs=1e-6)
        assert other == pytest.approx([a / deviation for a in slow], rel=1e-6, abs=1e-6)


def test_each_token_has_the_lag_of_the_version_that_sampled_it():
    rollout = Rollout("a", 0, 0, [1], [5, 6, 7, 8, 9], [-1.0] * 5, [3, 4, 7], [0, 2, 3], 0.0, "stop")
    assert token_lags(rollout, 9) == [6, 6, 5, 2, 2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[int], limit: int):
    batches = split(lengths, limit)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= limit


def test_a_micro_batch_holds_as_many_rows_as_fit_with_their_padding_longest_first():
    assert split([2, 3, 4, 3, 2], 8) == [[2, 1], [3, 0], [4]]
    assert split([2, 3, 4, 3, 2], 12) == [[2, 1, 3], [0, 4]]
