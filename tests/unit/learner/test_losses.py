"""Each loss against a slow version, token by token, of its published formula; masks against slow loops; the edges."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.learner import weights
from app.learner.losses import WHOLE_STEP, Limits, Surrogate, Tokens, surrogate, whole_step
from app.protocol.learner_spec import LearnerSpec, LossName

LOSSES = get_args(LossName)
SPEC = LearnerSpec(loss="ppo_clip")
TOKEN = st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.integers(0, 7), st.integers(0, 3))
BATCH = st.tuples(st.lists(TOKEN, min_size=1, max_size=30), st.lists(st.floats(-3, 3), min_size=4, max_size=4))


def tokens_of(batch, dtype=torch.float64) -> Tokens:
    """Tokens sorted into four answers, one advantage an answer; draws from few values, so that some are on an edge."""
    rows, by_answer = batch
    rows = sorted(rows, key=lambda row: row[3])
    draw = torch.tensor([i * 7 % 10 / 10 for i in range(len(rows))], dtype=dtype)
    return Tokens(
        torch.tensor([r[0] for r in rows], dtype=dtype, requires_grad=True),
        torch.tensor([r[1] for r in rows], dtype=dtype),
        torch.tensor([by_answer[r[3]] for r in rows], dtype=dtype),
        torch.tensor([r[2] for r in rows]),
        torch.tensor([r[3] for r in rows]),
        draw=draw,
    )


def evaluated(spec: LearnerSpec, tokens: Tokens) -> tuple[Surrogate, torch.Tensor]:
    """The loss as the trainer uses it, and the gradient of Σ objective by log π_θ."""
    found = weights.log_ratio(tokens.logprobs.detach(), tokens.behaviour)
    limits = whole_step(spec, found, tokens.advantages) if spec.loss in WHOLE_STEP else Limits()
    made = surrogate(spec, tokens, limits)
    (gradient,) = torch.autograd.grad(made.objective.sum(), tokens.logprobs)
    return made, gradient


def slow_clip(r, a, low, high):
    """(value, whether the gradient is cut)"""
    cut = (a > 0 and r > high) or (a < 0 and r < low)
    return min(r * a, max(low, min(high, r)) * a), cut


def slow_m2_limit(squares, budget):
    """The smallest value that has to go, or ∞: remove the largest, one by one, until the mean is under the budget."""
    left, limit = sorted(squares), math.inf
    while left and sum(left) / len(left) >= budget:
        limit = left.pop()
    return limit


def slow_tau(ratios, advantages, budget):
    """By bisection; None if nothing has to be cut."""
    moved = [math.log(r) for r, a in zip(ratios, advantages, strict=True) if (a > 0 and r > 1) or (a < 0 and r < 1)]
    if not moved or sum(m * m for m in moved) / len(moved) <= budget:
        return None
    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        mean = sum(min(m * m, middle * middle) for m in moved) / len(moved)
        low, high = (middle, high) if mean <= budget else (low, middle)
    return low


def slow_bapo(ratios, advantages):
    def enough(low, high):
        gain = sum(min(r, high) * a for r, a in zip(ratios, advantages, strict=True) if a > 0)
        cost = sum(max(r, low) * -a for r, a in zip(ratios, advantages, strict=True) if a < 0)
        return gain >= 0.5 * cost

    low, high = 0.6, 1.2
    for _ in range(6):
        if not enough(low, high):
            low = min(low + 0.05, 0.9)
    for _ in range(36):
        if not enough(low, high):
            high = min(high + 0.05, 3.0)
    return low, high


def slow(loss: str, new, old, advantages, lags, answers, draws):
    """(objective, its derivative by log π_θ) of each token."""
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    limit = slow_m2_limit([(n - o) ** 2 for n, o in zip(new, old, strict=True)], 0.04)
    tau = slow_tau(ratios, advantages, 0.04)
    bounds = slow_bapo(ratios, advantages)
    for n, o, a, lag, answer, r, u in zip(new, old, advantages, lags, answers, ratios, draws, strict=True):
        if loss == "ppo_clip":
            value, cut = slow_clip(r, a, 0.8, 1.28)
            yield value, 0.0 if cut else r * a
        elif loss == "dppo":
            gone = (a > 0 and math.exp(n) - math.exp(o) > 0.2) or (a < 0 and math.exp(n) - math.exp(o) < -0.2)
            yield (0.0 if gone else r * a) - 1e-3 * (n - o) ** 2, (0.0 if gone else r * a) - 2e-3 * (n - o)
        elif loss == "tis":
            yield min(r, 2.0) * a, min(r, 2.0) * a
        elif loss == "icepop":
            weight = r if 0.5 <= r <= 5.0 else 0.0
            yield weight * a, weight * a
        elif loss == "decoupled":
            proximal = o + ((lag - 1) / lag if lag else 0.0) * (n - o)
            weight = math.exp(proximal - o)
            weight = 0.0 if weight > 5.0 else weight
            value, cut = slow_clip(math.exp(n - proximal), a, 0.8, 1.28)
            yield weight * value, 0.0 if cut else weight * math.exp(n - proximal) * a
        elif loss == "m2po":
            weight = r if (n - o) ** 2 < limit else 0.0
            yield weight * a, weight * a
        elif loss == "m2po_clip":
            low, high = (0.0, math.inf) if tau is None else (min(math.exp(-tau), 0.7), max(math.exp(tau), 1.5))
            value, cut = slow_clip(r, a, low, high)
            yield value, 0.0 if cut else r * a
        elif loss == "bapo":
            value, cut = slow_clip(r, a, *bounds)
            cut = cut or (a < 0 and r > 3.0)
            yield max(value, 3.0 * a) if a < 0 else value, 0.0 if cut else r * a
        elif loss == "cispo":
            yield min(r, 5.0) * a * n, min(r, 5.0) * a
        elif loss == "obrs":
            weight = min(max(1.0, r), 5.0) if u < min(1.0, r) else 0.0
            yield weight * a, weight * a
        else:
            mine = [m - p for m, p, s in zip(new, old, answers, strict=True) if s == answer]
            s = math.exp(sum(mine) / len(mine))
            value, cut = slow_clip(s, a, 1 - 3e-4, 1 + 4e-4)
            yield value, 0.0 if cut else s * a


@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=60)
@given(BATCH)
def test_value_and_gradient_are_those_of_the_formula(loss, batch):
    tokens = tokens_of(batch)
    made, gradient = evaluated(SPEC.model_copy(update={"loss": loss}), tokens)
    columns = (tokens.logprobs, tokens.behaviour, tokens.advantages, tokens.lag, tokens.sequence, tokens.draw)
    want = list(slow(loss, *(c.tolist() for c in columns)))
    assert made.objective.tolist() == pytest.approx([v for v, _ in want], rel=1e-7, abs=1e-7)
    assert gradient.tolist() == pytest.approx([g for _, g in want], rel=1e-7, abs=1e-7)
    assert not (made.high & made.low).any()


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_the_gradient_is_that_of_reinforce(loss):
    new = torch.tensor([-0.1, -2.0, -0.7, -5.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0, 0.5], dtype=torch.float64)
    lag, answer, draw = torch.tensor([0, 1, 2, 9, 30]), torch.tensor([0, 0, 1, 1, 2]), torch.full((5,), 0.9999)
    tokens = Tokens(new, new.detach(), advantages, lag, answer, draw=draw)
    made, gradient = evaluated(SPEC.model_copy(update={"loss": loss}), tokens)
    assert gradient.tolist() == pytest.approx(advantages.tolist())
    assert not (made.high | made.low).any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("one_sided", [False, True])
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(-200, 200), st.floats(-3, 3), st.integers(0, 40)), min_size=1, max_size=20))
def test_any_log_ratio_gives_a_finite_loss_and_gradient(loss, one_sided, rows):
    new = torch.tensor([min(0.0, d) for d, _, _ in rows], requires_grad=True)
    old = torch.tensor([min(0.0, -d) for d, _, _ in rows])
    advantages = torch.tensor([a for _, a, _ in rows])
    answers = torch.arange(len(rows)) // 3
    tokens = Tokens(new, old, advantages, torch.tensor([x for *_, x in rows]), answers, old, torch.rand(len(rows)))
    if one_sided:
        tokens = dataclasses.replace(tokens, held=torch.arange(len(rows)) % 2 == 0)
    changes = {"loss": loss, "kl_beta": 0.1, "replay_ratio": ("off", "token", "sequence")[len(rows) % 3]}
    made, gradient = evaluated(SPEC.model_copy(update=changes), tokens)
    assert torch.isfinite(made.objective).all()
    assert torch.isfinite(gradient).all()


@settings(deadline=None, max_examples=60)
@given(BATCH, st.sampled_from(["token", "sequence"]))
def test_the_replay_ratio_is_outside_of_the_clip_and_truncated(batch, kind):
    tokens = tokens_of(batch)
    made, gradient = evaluated(SPEC.model_copy(update={"replay_ratio": kind, "replay_cap": 1.5}), tokens)
    new, old, answers = tokens.logprobs.tolist(), tokens.behaviour.tolist(), tokens.sequence.tolist()
    moved = [n - o for n, o in zip(new, old, strict=True)]
    if kind == "sequence":
        moved = [sum(m for m, s in zip(moved, answers, strict=True) if s == answer) for answer in answers]
    want = [min(1.5, math.exp(m)) * a for m, a in zip(moved, tokens.advantages.tolist(), strict=True)]
    assert made.objective.tolist() == pytest.approx(want, rel=1e-7, abs=1e-7)
    assert gradient.tolist() == pytest.approx(want, rel=1e-7, abs=1e-7)
    assert made.high.tolist() == [math.exp(m) > 1.5 for m in moved]


@settings(deadline=None, max_examples=40)
@given(BATCH, st.sampled_from(["ppo_clip", "dppo", "tis"]))
def test_the_pull_to_v0_is_that_of_the_k3_estimator(batch, loss):
    tokens = tokens_of(batch)
    reference = tokens.behaviour * 0.5 - 0.3
    free, free_gradient = evaluated(SPEC.model_copy(update={"loss": loss}), tokens)
    pulled, gradient = evaluated(
        SPEC.model_copy(update={"loss": loss, "kl_beta": 0.25}), dataclasses.replace(tokens, reference=reference)
    )
    apart = [r - n for r, n in zip(reference.tolist(), tokens.logprobs.tolist(), strict=True)]
    kl = [math.exp(d) - d - 1 for d in apart]
    assert all(k >= 0 for k in kl)
    found = ((free.objective - pulled.objective) / 0.25).tolist()
    assert found == pytest.approx(kl, rel=1e-6, abs=1e-6)
    assert ((free_gradient - gradient) / 0.25).tolist() == pytest.approx(
        [1 - math.exp(d) for d in apart], rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize(("threshold", "rejected"), [(1.0, [0.75, 0.2, 0, 0]), (2.0, [0.875, 0.6, 0.5, 0])])
def test_obrs_has_the_gradient_of_importance_sampling_on_the_average(threshold: float, rejected: list[float]):
    ratios = torch.tensor([0.25, 0.8, 1.0, 2.5], dtype=torch.float64)
    new, count = (ratios * 0.1).log(), 2000
    rows = torch.arange(count * 4) % 4
    tokens = Tokens(
        new[rows].requires_grad_(),
        torch.full((count * 4,), math.log(0.1), dtype=torch.float64),
        torch.ones(count * 4, dtype=torch.float64),
        torch.ones_like(rows),
        rows,
        draw=(torch.arange(count * 4) // 4 + 0.5) / count,
    )
    made, gradient = evaluated(SPEC.model_copy(update={"loss": "obrs", "obrs_lambda": threshold}), tokens)
    assert gradient.reshape(count, 4).mean(0).tolist() == pytest.approx(ratios.tolist(), abs=1e-3)
    assert made.low.reshape(count, 4).double().mean(0).tolist() == pytest.approx(rejected, abs=1e-3)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "high", "low"),
    [(0.0, 1, 0, 0), (0.3, 1, 1, 0), (-0.3, 1, 0, 0), (-0.3, -1, 0, 1), (0.3, -1, 0, 0)],
)
def test_a_token_that_moved_beyond_the_range_gets_no_further_push(log_ratio, advantage, high, low):
    tokens = Tokens(
        torch.tensor([log_ratio - 1.0], requires_grad=True),
        torch.tensor([-1.0]),
        torch.tensor([float(advantage)]),
        torch.tensor([1]),
        torch.tensor([0]),
    )
    made, gradient = evaluated(SPEC, tokens)
    assert (gradient.item() == 0.0) is bool(high or low)
    assert (made.high.item(), made.low.item()) == (bool(high), bool(low))


BARE = {"loss": "ppo_clip", "replay_ratio": "token"}
"""Truncated, not clipped."""


@pytest.mark.parametrize(
    ("fields", "ratio", "advantage", "mark"),
    [
        ({"loss": "ppo_clip"}, 1.3, 1, "high"),
        ({"loss": "ppo_clip"}, 0.7, -1, "low"),
        ({"loss": "ppo_clip"}, 4.0, 0, ""),  # nothing pushes it
        ({"loss": "ppo_clip"}, 0.2, 0, ""),
        ({"loss": "dppo"}, 4.0, 0, ""),
        ({"loss": "dppo"}, 0.2, 0, ""),
        ({"loss": "bapo"}, 3.1, 0, ""),
        ({"loss": "dppo"}, 4.0, 1, "high"),
        ({"loss": "dppo"}, 4.0, -1, ""),
        ({"loss": "dppo"}, 0.25, -1, "low"),
        ({"loss": "dppo"}, 0.25, 1, ""),
        (BARE, 2.1, -1, "high"),
        (BARE, 1.9, 1, ""),
        (BARE, 0.1, -1, ""),
        ({"loss": "tis"}, 2.1, -1, "high"),
        ({"loss": "tis"}, 1.9, 1, ""),
        ({"loss": "tis"}, 0.1, -1, ""),
        ({"loss": "cispo"}, 5.1, -1, "high"),
        ({"loss": "cispo"}, 4.9, 1, ""),
        ({"loss": "cispo"}, 0.1, -1, ""),
        ({"loss": "icepop"}, 5.1, -1, "high"),
        ({"loss": "icepop"}, 4.9, 1, ""),
        ({"loss": "icepop"}, 0.49, 1, "low"),
        ({"loss": "icepop"}, 0.51, -1, ""),
        ({"loss": "decoupled"}, 26.0, -1, "high"),  # lag 2: half of the way is √26, over its cap
        ({"loss": "decoupled"}, 1.7, 1, "high"),
        ({"loss": "decoupled"}, 1.7, -1, ""),
        ({"loss": "decoupled"}, 0.6, -1, "low"),
        ({"loss": "m2po"}, 1.5, -1, "high"),
        ({"loss": "m2po"}, 0.7, 1, "low"),
        ({"loss": "m2po"}, 1.1, 1, ""),
        ({"loss": "m2po_clip"}, 1.6, 1, "high"),
        ({"loss": "m2po_clip"}, 1.6, -1, ""),
        ({"loss": "m2po_clip"}, 0.6, -1, "low"),
        ({"loss": "bapo", "bapo_target": 0.0}, 1.3, 1, "high"),
        ({"loss": "bapo"}, 0.5, -1, "low"),
        ({"loss": "bapo"}, 3.1, -1, "high"),  # the dual clip
        ({"loss": "bapo"}, 2.9, -1, ""),
        ({"loss": "gspo"}, 1.001, 1, "high"),
        ({"loss": "gspo"}, 0.999, -1, "low"),
        ({"loss": "gspo"}, 1.001, -1, ""),
        ({"loss": "obrs"}, 0.4, 1, "low"),  # rejected: the draw is 0.5
        ({"loss": "obrs"}, 0.6, -1, ""),
        ({"loss": "obrs"}, 5.1, -1, "high"),
    ],
    ids=str,
)
def test_a_token_counts_as_held_back_on_the_side_to_which_it_has_moved(fields, ratio, advantage, mark):
    """What `clip_share_high` and `clip_share_low` count: masked, clipped or truncated tokens."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    column = torch.tensor([float(advantage)], dtype=torch.float64)
    tokens = Tokens(new, old, column, torch.tensor([2]), torch.tensor([0]), draw=torch.tensor([0.5]))
    spec = LearnerSpec.model_validate({"dppo_mask_low": 0.1, **fields})
    made, _ = evaluated(spec, tokens)
    assert (made.high.item(), made.low.item()) == (mark == "high", mark == "low")


def test_dppo_lets_a_rare_token_grow_and_stops_a_frequent_one():
    # Both ratios are beyond PPO's range; 1e-4 → 3e-4 is harmless, 0.5 → 0.75 is not.
    new = torch.tensor([3e-4, 0.75], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([1e-4, 0.5], dtype=torch.float64).log()
    tokens = Tokens(new, old, torch.ones(2, dtype=torch.float64), torch.tensor([1, 1]), torch.tensor([0, 0]))
    made, gradient = evaluated(SPEC.model_copy(update={"loss": "dppo", "dppo_pull": 0.0}), tokens)
    assert made.high.tolist() == [False, True]
    assert gradient.tolist() == pytest.approx([3.0, 0.0])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=40), st.floats(0.001, 2))
def test_second_moment_mask_drops_the_largest_until_the_rest_fits(values, budget):
    keep = weights.second_moment_mask(torch.tensor(values, dtype=torch.float64), budget)
    limit = slow_m2_limit([v * v for v in values], budget)
    assert keep.tolist() == [v * v < limit for v in values]


@given(
    st.lists(st.tuples(st.integers(-30, 30), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0])), min_size=1, max_size=30),
    st.floats(0.05, 4),
)
def test_the_range_of_m2po_is_the_widest_that_keeps_harmful_tokens_within_the_budget(rows, budget):
    log_ratios, advantages = [tenths / 10 for tenths, _ in rows], [a for _, a in rows]
    found = weights.second_moment_bounds(
        torch.tensor(log_ratios, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64), budget
    )
    tau = slow_tau([math.exp(r) for r in log_ratios], advantages, budget)
    wanted = (0.0, math.inf) if tau is None else (min(math.exp(-tau), 0.7), max(math.exp(tau), 1.5))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_log_ratios_are_cut_at_twenty_token_by_token_and_over_an_answer():
    new, old = torch.tensor([0.0, -50.0, -1.0]), torch.tensor([-50.0, 0.0, -3.0])
    answers = torch.tensor([0, 1, 2])
    assert weights.log_ratio(new, old).tolist() == [20.0, -20.0, 2.0]
    assert weights.sequence_log_ratio(new, old, answers).tolist() == [20.0, -20.0, 2.0]
    assert weights.answer_log_ratio(new, old, answers).tolist() == [20.0, -20.0, 2.0]
    spread = torch.tensor([0.0, -50.0]), torch.tensor([-50.0, 0.0])
    assert weights.answer_log_ratio(*spread, torch.tensor([0, 0])).tolist() == [0.0, 0.0], "the sum is cut, not tokens"


def test_effective_sample_size():
    assert weights.effective_sample_size(torch.zeros(7)) == pytest.approx(1.0)
    assert weights.effective_sample_size(torch.tensor([20.0, -20.0, -20.0, -20.0])) == pytest.approx(0.25)
    assert weights.effective_sample_size(torch.tensor([0.0, math.log(3)])) == pytest.approx(16 / (2 * 10), rel=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "ppo"},
        {"gac_low": 0.95},
        {"replay_ratio": "on"},
        {"bapo_low": 0.95},
        {"bapo_high_max": 1.1},
        {"bapo_dual_clip": 2.0},
        {"scale_rewards": "std"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        LearnerSpec.model_validate(wrong)


def test_rewards_are_scaled_as_the_loss_needs_unless_told_otherwise():
    assert LearnerSpec().loss == "dppo"
    assert LearnerSpec().reward_scale == "none"
    assert LearnerSpec(loss="ppo_clip").reward_scale == "group"
    assert LearnerSpec(loss="dppo", scale_rewards="batch").reward_scale == "batch"
