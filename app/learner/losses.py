"""Policy losses over tokens.

Invariant: every term is a sum over tokens divided by a count that is fixed for the whole step, so that the gradient
doesn't depend on how the step is cut into micro-batches or on which tokens without gradient are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) ≈ 5e8: far beyond every clip range, and finite in float32."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss` carries the gradient; the others are detached sums over the tokens given."""

    loss: torch.Tensor
    ratio: torch.Tensor
    mismatch_kl: torch.Tensor
    log_ratio_squared: torch.Tensor
    clipped: torch.Tensor


def ppo_clip(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: int,
) -> LossTerms:
    """Clipped surrogate against the behaviour policy, token mean (PPO, arXiv 1707.06347, eq. 7).

    r = exp(clamp(log π_θ − log π_behaviour, ±20));  loss = −Σ min(r·Â, clip(r, 1 − low, 1 + high)·Â) / denominator.

    The asymmetric range is DAPO's "clip-higher" and the global token mean its token-level loss (arXiv 2503.14476,
    eq. 8). The ratio is against the log-probs that the node recorded while sampling, which makes the clip the
    off-policy correction: a token that the policy has already moved beyond the range gets no further push. All inputs
    are 1-D, one element a completion token. `denominator` is the number of completion tokens of the whole step, those
    of zero-advantage groups included. The clamp keeps value and gradient finite for any pair of finite log-probs.

    `mismatch_kl` sums r − 1 − log r, the non-negative estimator of KL(behaviour ‖ π_θ) (Schulman, "Approximating KL
    divergence", k3).
    """
    log_ratio = (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum() / denominator
    with torch.no_grad():
        high = (advantages > 0) & (ratio > 1 + clip_high)
        low = (advantages < 0) & (ratio < 1 - clip_low)
        return LossTerms(
            loss=loss,
            ratio=ratio.sum(),
            mismatch_kl=(ratio - 1 - log_ratio).sum(),
            log_ratio_squared=log_ratio.square().sum(),
            clipped=(high | low).sum(),
        )
