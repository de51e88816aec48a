"""Advantages and loss against slow versions written from the formulas, and their behaviour at the edges."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.learner.advantages import group_advantages
from app.learner.losses import ppo_clip
from app.learner.microbatch import split

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


def slow_loss(new, old, advantages, low, high, denominator):
    total = 0.0
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(max(-20.0, min(20.0, n - o)))
        total += min(ratio * a, max(1 - low, min(1 + high, ratio)) * a)
    return -total / denominator


TOKENS = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=30)


@given(TOKENS, st.floats(0.05, 0.9), st.floats(0.05, 3), st.integers(0, 50))
def test_loss_is_the_formula(tokens, low: float, high: float, silent: int):
    new, old, advantages = (list(column) for column in zip(*tokens, strict=True))
    terms = ppo_clip(
        torch.tensor(new, dtype=torch.float64),
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        clip_low=low,
        clip_high=high,
        denominator=len(tokens) + silent,
    )
    want = slow_loss(new, old, advantages, low, high, len(tokens) + silent)
    assert terms.loss.item() == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert terms.mismatch_kl.item() >= -1e-9


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-200, 200), st.floats(-3, 3)), min_size=1, max_size=20))
def test_any_ratio_gives_a_finite_loss_and_gradient(tokens):
    new = torch.tensor([d for d, _ in tokens], dtype=torch.float32, requires_grad=True)
    advantages = torch.tensor([a for _, a in tokens], dtype=torch.float32)
    terms = ppo_clip(new, torch.zeros(len(tokens)), advantages, clip_low=0.2, clip_high=0.28, denominator=len(tokens))
    torch.autograd.backward(terms.loss)
    assert torch.isfinite(terms.loss)
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(0.0, 1.0, False), (0.3, 1.0, True), (-0.3, 1.0, False), (-0.3, -1.0, True), (0.3, -1.0, False)],
)
def test_a_token_that_moved_beyond_the_range_gets_no_further_push(log_ratio, advantage, clipped):
    new = torch.tensor([log_ratio], requires_grad=True)
    terms = ppo_clip(new, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, denominator=1)
    torch.autograd.backward(terms.loss)
    assert (new.grad.item() == 0.0) is clipped
    assert bool(terms.clipped) is clipped


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[int], limit: int):
    batches = split(lengths, limit)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= limit
