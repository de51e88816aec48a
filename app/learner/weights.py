"""Importance weights and masks of tokens.

Invariant: nothing here carries a gradient but `log_ratio`, `sequence_log_ratio` and `answer_log_ratio`; every weight is
finite for any pair of finite log-probs; a mask is a function of the numbers alone, never of how they are cut into
micro-batches.

All tensors are 1-D, one element a completion token. r = π_θ(token) / π_behaviour(token).
"""

from __future__ import annotations

import math

import torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) ≈ 5e8: far beyond every clip range, and finite in float32."""
M2_NARROWEST = (0.7, 1.5)
"""`second_moment_bounds` never cuts inside this range of ratios (M2PO's code: miniclip 0.3 and 0.5)."""


def log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """log r, clamped to ±20; outside it has no gradient."""
    return (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Mean of log r over the tokens of each token's answer, clamped to ±20 (GSPO, arXiv 2507.18071).

    `sequence` numbers the answers; all tokens of an answer must be here.
    """
    difference = logprobs - behaviour
    answers = int(sequence.max()) + 1
    total = difference.new_zeros(answers).index_add(0, sequence, difference)
    count = torch.bincount(sequence, minlength=answers).clamp(min=1)
    return (total / count)[sequence].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def answer_log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum of log r over the tokens of each token's answer, log π_θ(y|x) / π_behaviour(y|x), clamped to ±20.

    `sequence` numbers the answers; all tokens of an answer must be here.
    """
    difference = logprobs - behaviour
    total = difference.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, difference)
    return total[sequence].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@torch.no_grad()
def probability_mask(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to leave out because they have moved too far up, and too far down, where their advantage pushes them.

    DPPO-Binary-TV (arXiv 2602.04879): up if A > 0 and π_θ − π_behaviour > high, down if A < 0 and π_θ − π_behaviour <
    −low. The distance is one of probabilities: a rare token may triple, a frequent one may not vanish.
    """
    moved = logprobs.exp() - behaviour.exp()
    return (advantages > 0) & (moved > high), (advantages < 0) & (moved < -low)


@torch.no_grad()
def loglinear_proximal(logprobs: torch.Tensor, behaviour: torch.Tensor, lag: torch.Tensor) -> torch.Tensor:
    """log π of the policy one update before π_θ, without a forward pass of it (A-3PO, arXiv 2512.06547).

    log π_prox = log π_behaviour + α (log π_θ − log π_behaviour), α = (v_prox − v_behaviour) / (v_θ − v_behaviour) =
    (lag − 1) / lag, and 0 for lag 0; v_prox = v_θ − 1. `lag` is t − x of each token.
    """
    share = (lag - 1).clamp(min=0) / lag.clamp(min=1)
    return behaviour + share * log_ratio(logprobs, behaviour)


@torch.no_grad()
def second_moment_mask(log_ratios: torch.Tensor, budget: float) -> torch.Tensor:
    """Tokens to keep: the largest (log r)² are left out until the mean of the rest is below `budget`.

    M2PO (arXiv 2510.01161), over the whole batch. Equal values are kept or left out together.
    """
    squares = log_ratios.double().square()
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
    kept = int((means < budget).sum())
    return torch.ones_like(squares, dtype=torch.bool) if kept == len(ordered) else squares < ordered[kept]


@torch.no_grad()
def second_moment_bounds(log_ratios: torch.Tensor, advantages: torch.Tensor, budget: float) -> tuple[float, float]:
    """Clip range of the ratio, (e^−τ, e^τ) but never inside M2_NARROWEST; (0, ∞) if nothing needs to be cut.

    The form in the code of M2PO's authors: only tokens count that have moved where their advantage pushes them (A > 0
    and r > 1, A < 0 and r < 1), over the whole batch; τ is the largest for which the mean of min((log r)², τ²) stays
    within `budget`. (Their code rounds τ down to one of the values; here it is exact.)
    """
    harmful = ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))
    ordered = log_ratios[harmful].double().square().sort().values
    count = len(ordered)
    total = budget * count
    if count == 0 or float(ordered.sum()) <= total:
        return 0.0, math.inf
    below = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]])
    level = (total - below) / torch.arange(count, 0, -1, dtype=ordered.dtype, device=ordered.device)
    # The first value that the level doesn't reach; there is one, because all of them together are over budget.
    tau = math.sqrt(float(level[int((level <= ordered).int().argmax())]))
    return min(math.exp(-tau), M2_NARROWEST[0]), max(math.exp(tau), M2_NARROWEST[1])


@torch.no_grad()
def balanced_bounds(
    log_ratios: torch.Tensor,
    advantages: torch.Tensor,
    *,
    target: float,
    low: tuple[float, float],
    high: tuple[float, float],
    step: float,
) -> tuple[float, float]:
    """Clip range of the ratio that lets positive advantages weigh enough (BAPO, arXiv 2510.18927, authors' code).

    Over the whole batch P = Σ_{A>0} min(r, c_high)·A and N = Σ_{A<0} max(r, c_low)·|A|. From `low[0]` and `high[0]`
    first c_low rises by `step` up to `low[1]`, then c_high up to `high[1]`, until P / N ≥ target.

    The paper's text speaks of P's share of P + N instead. As in the code, a higher c_low only raises N, so that once
    c_low moves, it moves to its end.
    """
    ratio = log_ratios.double().exp()
    up, down = ratio[advantages > 0], ratio[advantages < 0]
    gain, cost = advantages[advantages > 0].double(), -advantages[advantages < 0].double()

    def short(c_low: float, c_high: float) -> bool:
        return float((up.clamp(max=c_high) * gain).sum()) < target * float((down.clamp(min=c_low) * cost).sum())

    c_low, c_high = low[0], high[0]
    while c_low < low[1] and short(c_low, c_high):
        c_low = min(c_low + step, low[1])
    while c_high < high[1] and short(c_low, c_high):
        c_high = min(c_high + step, high[1])
    return c_low, c_high


@torch.no_grad()
def one_sided(log_weight: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """What each token's push is multiplied with so that its importance weight is at most 1, where `held` is set:
    min(1, 1 / w), and 1 elsewhere.

    After HACPO (arXiv 2603.02604, eq. 13), which gives rollouts of another model no weight above 1: it may teach less
    than the policy's own, never more. There a token with w > 1 is clipped away; here it keeps its push, with weight 1,
    for of the tokens of a policy that differs by rounding alone half have w > 1.
    """
    return torch.where(held, (-log_weight.clamp(min=0)).exp(), 1.0)


@torch.no_grad()
def effective_sample_size(log_ratios: torch.Tensor) -> float:
    """(Σ r)² / (n Σ r²): 1 on-policy, towards 1/n when one token outweighs all others (Kish)."""
    ratio = log_ratios.double().exp()
    return float(ratio.sum().square() / (len(ratio) * ratio.square().sum()))
