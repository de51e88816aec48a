"""Policy losses over tokens.

Invariant: the loss is −Σ objective / denominator, a sum over tokens divided by a count that is fixed for the whole
step, so that the gradient doesn't depend on how the step is cut into micro-batches or on which tokens without gradient
are left out. What must be known of the whole step is found before (`whole_step`) and handed in.

Every ratio is against the log-probs that the node recorded while sampling, r = exp(clamp(log π_θ − log π_behaviour,
±20)): one ratio corrects for staleness and for the difference between engines. sg[·] stops the gradient. There is one
update a batch, so π_old of the papers' inner ratio π_θ / π_old is π_θ itself: value 1, gradient ∇ log π_θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from app.learner import weights
from app.protocol.learner_spec import LearnerSpec, LossName

WHOLE_STEP: frozenset[LossName] = frozenset({"m2po", "m2po_clip", "bapo"})
"""Losses that need `whole_step`: one more forward pass, without gradient, over the step."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """1-D tensors, one element a completion token. `lag` is t − x of the token, `sequence` numbers the answers; all
    tokens of an answer are together. `reference` is log π of v0, given if `kl_beta` is above 0; `draw` a number in
    [0, 1) for a loss that rejects at random; `held` marks tokens that get no weight above 1, given if there may be
    some."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    lag: torch.Tensor
    sequence: torch.Tensor
    reference: torch.Tensor | None = None
    draw: torch.Tensor | None = None
    held: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a loss knows of the whole step: a range of the ratio, and which tokens stay in (1-D, None: all)."""

    low: float = 0.0
    high: float = math.inf
    keep: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Surrogate:
    """`objective` is to be maximised, one element a token, and carries the gradient. `high` and `low` mark tokens that
    are masked, clipped or truncated because their ratio is too large or too small; no token is in both."""

    objective: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor


def surrogate(spec: LearnerSpec, tokens: Tokens, limits: Limits | None = None) -> Surrogate:
    """The chosen loss, with its pull towards v0 if there is one. `limits` must be given for losses in WHOLE_STEP and is
    not looked at for others."""
    made = _LOSSES[spec.loss](spec, tokens, limits or Limits())
    if tokens.held is not None:
        held = weights.one_sided(log_weight(spec, tokens), tokens.held)
        made = replace(made, objective=made.objective * held)
    if tokens.reference is None or spec.kl_beta == 0:
        return made
    return replace(made, objective=made.objective - spec.kl_beta * reference_kl(tokens.logprobs, tokens.reference))


@torch.no_grad()
def log_weight(spec: LearnerSpec, tokens: Tokens) -> torch.Tensor:
    """log of the weight that a loss gives the push of a token, π_θ / π_behaviour with its own truncation, before masks
    and clips. Not of obrs."""
    if spec.loss == "gspo":
        return weights.sequence_log_ratio(tokens.logprobs, tokens.behaviour, tokens.sequence)
    found = weights.log_ratio(tokens.logprobs, tokens.behaviour)
    if spec.loss == "ppo_clip" and spec.replay_ratio != "off":
        if spec.replay_ratio == "sequence":
            found = weights.answer_log_ratio(tokens.logprobs, tokens.behaviour, tokens.sequence)
        return found.clamp(max=math.log(spec.replay_cap))
    if spec.loss in {"tis", "cispo"}:
        return found.clamp(max=math.log(spec.tis_cap if spec.loss == "tis" else spec.cispo_cap))
    return found


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """π_ref / π_θ − log(π_ref / π_θ) − 1 of each token: the estimator of KL(π_θ ‖ π_ref) in GRPO (DeepSeekMath, arXiv
    2402.03300, eq. 4). Never negative; unbiased only for tokens sampled from π_θ, so not with lag."""
    difference = weights.log_ratio(reference, logprobs)
    return difference.exp() - difference - 1


def whole_step(spec: LearnerSpec, log_ratios: torch.Tensor, advantages: torch.Tensor) -> Limits:
    """The limits of a loss in WHOLE_STEP, from log r and advantages of all tokens of the step that are trained on."""
    if spec.loss == "m2po":
        return Limits(keep=weights.second_moment_mask(log_ratios, spec.m2_budget))
    if spec.loss == "m2po_clip":
        return Limits(*weights.second_moment_bounds(log_ratios, advantages, spec.m2_budget))
    return Limits(
        *weights.balanced_bounds(
            log_ratios,
            advantages,
            target=spec.bapo_target,
            low=(spec.bapo_low, spec.bapo_low_max),
            high=(spec.bapo_high, spec.bapo_high_max),
            step=spec.bapo_step,
        )
    )


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Surrogate:
    """min(r·Â, clip(r, low, high)·Â) (PPO, arXiv 1707.06347, eq. 7).

    A token that the policy has already moved beyond the range where its advantage pushes it gets no further push.
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return Surrogate(objective, (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low))


def ppo_clip(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """PPO's clip, with DAPO's asymmetric range and token-level mean (arXiv 2503.14476, eq. 8).

    With `replay_ratio`: sg[min(w̄, π_old / π_v)]·min(ρ·Â, clip(ρ)·Â), ρ = π_θ / π_old (ECHO-2, arXiv 2602.02192, Eq. 24
    in words: an outer truncated ratio for replay). Its printed form was not available: that the ratio is that of whole
    answers ("sequence") or of tokens ("token"), and w̄, are inferred. The ratio against the sampler is then in the
    weight and nowhere else, else it would be counted twice; with one update a batch ρ is 1 and the clip never acts.
    """
    low, high = 1 - spec.clip_low, 1 + spec.clip_high
    if spec.replay_ratio == "off":
        return clipped(_ratio(tokens), tokens.advantages, low, high)
    log_ratio = weights.log_ratio(tokens.logprobs, tokens.behaviour).detach()
    if spec.replay_ratio == "sequence":
        log_ratio = weights.answer_log_ratio(tokens.logprobs, tokens.behaviour, tokens.sequence).detach()
    ratio = log_ratio.exp()
    beyond = ratio > spec.replay_cap
    objective = ratio.clamp(max=spec.replay_cap) * clipped(_inner(tokens), tokens.advantages, low, high).objective
    return Surrogate(objective, beyond, torch.zeros_like(beyond))


def dppo(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """M·r·Â − pull·(log r)², M from `probability_mask` (DPPO, arXiv 2602.04879; the pull: arXiv 2602.02276).

    The pull acts on masked tokens too. Groups without a signal are left out, so it does not act on them.
    """
    log_ratio = weights.log_ratio(tokens.logprobs, tokens.behaviour)
    high, low = weights.probability_mask(
        tokens.logprobs, tokens.behaviour, tokens.advantages, low=spec.dppo_mask_low, high=spec.dppo_mask_high
    )
    push = ~(high | low) * log_ratio.exp() * tokens.advantages
    return Surrogate(push - spec.dppo_pull * log_ratio.square(), high, low)


def tis(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """sg[min(r, cap)]·Â·(π_θ / sg[π_θ]): truncated importance sampling (IMPALA, arXiv 1802.01561; for language
    models "Your efficient RL framework secretly brings you off-policy RL training", fengyao.notion.site, 2025).

    Its gradient is that of cispo with the same cap.
    """
    ratio = _ratio(tokens).detach()
    high = ratio > spec.tis_cap
    return Surrogate(ratio.clamp(max=spec.tis_cap) * tokens.advantages * _inner(tokens), high, torch.zeros_like(high))


def icepop(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """sg[r·1(low ≤ r ≤ high)]·Â·(π_θ / sg[π_θ]): tokens outside the band are masked, whatever their advantage (IcePop,
    arXiv 2510.18855)."""
    ratio = _ratio(tokens).detach()
    high, low = ratio > spec.icepop_high, ratio < spec.icepop_low
    return Surrogate(~(high | low) * ratio * tokens.advantages * _inner(tokens), high, low)


def decoupled(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """sg[w]·min(ρ·Â, clip(ρ)·Â), ρ = π_θ / π_prox, w = π_prox / π_behaviour, masked where w > cap.

    Decoupled PPO (AReaL, arXiv 2505.24298), π_prox from `loglinear_proximal`.
    """
    proximal = weights.loglinear_proximal(tokens.logprobs, tokens.behaviour, tokens.lag)
    weight = weights.log_ratio(proximal, tokens.behaviour).exp()
    masked = weight > spec.decoupled_cap
    inner = clipped(
        weights.log_ratio(tokens.logprobs, proximal).exp(), tokens.advantages, 1 - spec.clip_low, 1 + spec.clip_high
    )
    return Surrogate(~masked * weight * inner.objective, inner.high | masked, inner.low & ~masked)


def m2po(spec: LearnerSpec, tokens: Tokens, limits: Limits) -> Surrogate:
    """M·r·Â, M from `second_moment_mask` over the whole step; no clip (M2PO, arXiv 2510.01161)."""
    ratio = _ratio(tokens)
    keep = torch.ones_like(ratio, dtype=torch.bool) if limits.keep is None else limits.keep
    return Surrogate(keep * ratio * tokens.advantages, ~keep & (ratio > 1), ~keep & (ratio <= 1))


def m2po_clip(spec: LearnerSpec, tokens: Tokens, limits: Limits) -> Surrogate:
    """PPO's clip with the range of `second_moment_bounds` over the whole step (code of M2PO's authors)."""
    return clipped(_ratio(tokens), tokens.advantages, limits.low, limits.high)


def bapo(spec: LearnerSpec, tokens: Tokens, limits: Limits) -> Surrogate:
    """PPO's clip with the range of `balanced_bounds` over the whole step, and for Â < 0 at least c·Â (BAPO, arXiv
    2510.18927; dual clip: arXiv 1912.09729)."""
    ratio, advantages = _ratio(tokens), tokens.advantages
    inner = clipped(ratio, advantages, limits.low, limits.high)
    floor = torch.maximum(inner.objective, spec.bapo_dual_clip * advantages)
    beyond = (advantages < 0) & (ratio > spec.bapo_dual_clip)
    return Surrogate(torch.where(advantages < 0, floor, inner.objective), inner.high | beyond, inner.low)


def cispo(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """sg[min(r, cap)]·Â·log π_θ: the weight is truncated, no token loses its gradient (MiniMax-M1, arXiv 2506.13585,
    which has no lower bound either)."""
    ratio = _ratio(tokens).detach()
    high = ratio > spec.cispo_cap
    objective = ratio.clamp(max=spec.cispo_cap) * tokens.advantages * tokens.logprobs
    return Surrogate(objective, high, torch.zeros_like(high))


def obrs(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """Experimental. Optimal budgeted rejection: keep a sampled token with probability a = min(1, r / λ), and give those
    kept the weight sg[min(max(λ, r), cap)] (after Jackpot, Infini-AI-Lab/jackpot, eq. 3 and alg. 1).

    Right here: the rule of acceptance and, but for the cap, a·max(λ, r) = r, so that the gradient is that of full
    importance sampling on the average. Left out: the normaliser Z_t = E[a], which differs from token to token and needs
    the sampler's top log-probs, that nodes don't record; and the target is π_θ alone. The paper's λ and caps are not
    known to us.
    """
    if tokens.draw is None:
        raise ValueError("obrs needs a draw for each token")
    ratio = _ratio(tokens).detach()
    rejected = tokens.draw >= ratio / spec.obrs_lambda
    weight = ratio.clamp(min=spec.obrs_lambda).clamp(max=spec.obrs_cap)
    return Surrogate(
        ~rejected * weight * tokens.advantages * _inner(tokens), ~rejected & (ratio > spec.obrs_cap), rejected
    )


def gspo(spec: LearnerSpec, tokens: Tokens, _: Limits) -> Surrogate:
    """PPO's clip of the ratio of whole answers, s = exp(mean of log r over the answer) (GSPO, arXiv 2507.18071).

    Each token of an answer counts s·Â here, over the token count of the step like everywhere; the paper has the mean
    over answers instead, which gives tokens of short answers more weight.
    """
    ratio = weights.sequence_log_ratio(tokens.logprobs, tokens.behaviour, tokens.sequence).exp()
    return clipped(ratio, tokens.advantages, 1 - spec.gspo_low, 1 + spec.gspo_high)


def _ratio(tokens: Tokens) -> torch.Tensor:
    return weights.log_ratio(tokens.logprobs, tokens.behaviour).exp()


def _inner(tokens: Tokens) -> torch.Tensor:
    """1, with the gradient of log π_θ."""
    return (tokens.logprobs - tokens.logprobs.detach()).exp()


_LOSSES: Mapping[LossName, Callable[[LearnerSpec, Tokens, Limits], Surrogate]] = {
    "ppo_clip": ppo_clip,
    "dppo": dppo,
    "tis": tis,
    "icepop": icepop,
    "decoupled": decoupled,
    "m2po": m2po,
    "m2po_clip": m2po_clip,
    "bapo": bapo,
    "cispo": cispo,
    "gspo": gspo,
    "obrs": obrs,
}
