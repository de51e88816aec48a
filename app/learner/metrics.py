"""What a step tells about itself.

Invariant: every number is of the whole step, whatever the micro-batches were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from app.learner.buffer import Group
from app.learner.microbatch import NO_LAG
from app.learner.weights import effective_sample_size
from app.protocol.trajectory import Rollout


@dataclass(frozen=True, slots=True)
class Seen:
    """Loss, and of each token that was trained on: log r, version lag, held back for moving too far up or down.
    `reference_kl` is summed over them, None if there is no reference. Tensors lie in host memory."""

    loss: float
    log_ratio: torch.Tensor
    lag: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    reference_kl: float | None = None

    def of(self, which: torch.Tensor) -> Seen:
        """Some of the tokens; loss and divergence stay those of the step."""
        log_ratio, lag, high, low = (t[which] for t in (self.log_ratio, self.lag, self.high, self.low))
        return replace(self, log_ratio=log_ratio, lag=lag, high=high, low=low)


def step_metrics(groups: Sequence[Group], seen: Seen, tokens: int) -> dict[str, float]:
    """Means over the step. What is said of ratios is over the tokens that were trained on, entropy over all that the
    policy wrote, and `tokens` of those. `completion_tokens` counts what the policy wrote of an answer, `answer_tokens`
    what the environment of a task with several turns put in, too.

    The entropy is that of the behaviour policy, estimated as the mean of −log π of the tokens it sampled. `groups` are
    those of this job; of tokens that another model sampled only `borrowed_metrics` tell.
    """
    own = seen.of(seen.lag != NO_LAG)
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = [r.own_tokens for r in rollouts]
    whole = [len(r.completion_ids) for r in rollouts]
    return (
        {
            "reward": statistics.fmean(r.reward for r in rollouts),
            "loss": seen.loss,
            # What the environment wrote has the log-prob 0.
            "entropy": -sum(sum(r.logprobs) for r in rollouts) / tokens,
            "zero_variance_share": sum(len({r.reward for r in g.rollouts}) == 1 for g in groups) / len(groups),
            "truncated_share": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
            "completion_tokens_mean": statistics.fmean(lengths),
            "completion_tokens_max": float(max(lengths)),
            "answer_tokens_mean": statistics.fmean(whole),
            "answer_tokens_max": float(max(whole)),
            "tokens": float(tokens),
            "rollouts": float(len(rollouts)),
            "active_tokens": float(len(own.log_ratio)),
        }
        | ratio_metrics(own)
        | _reference(seen)
    )


def borrowed_metrics(groups: Sequence[Group], seen: Seen) -> dict[str, float]:
    """Of the groups of another model, if there are any: how many, what they are worth, and how far it is from ours."""
    if not groups:
        return {}
    rollouts = [r for g in groups for r in g.rollouts]
    found = {"groups": float(len(groups)), "reward": statistics.fmean(r.reward for r in rollouts)}
    theirs = seen.of(seen.lag == NO_LAG)
    if len(theirs.log_ratio):
        found |= _distance(theirs.log_ratio, theirs.high | theirs.low)
    return {f"borrowed_{name}": value for name, value in found.items()}


def ratio_metrics(seen: Seen) -> dict[str, float]:
    """How far the policy is from those that sampled, r = π_θ / π_behaviour of each token.

    `mismatch_kl` is the mean of r − 1 − log r, the non-negative estimator of KL(behaviour ‖ π_θ) (Schulman,
    "Approximating KL divergence", k3). `{name}_lag_{k}` is that of the tokens of lag k. Without tokens: what is true
    on-policy.
    """
    if len(seen.log_ratio) == 0:
        return dict.fromkeys(("mismatch_kl", "log_ratio_squared", *_SHARES), 0.0) | dict.fromkeys(_ONES, 1.0)
    by_lag: dict[str, float] = {}
    for lag in torch.unique(seen.lag).tolist():
        own = seen.lag == lag
        found = _distance(seen.log_ratio[own], (seen.high | seen.low)[own])
        by_lag |= {f"{name}_lag_{lag}": value for name, value in found.items()}
    return {
        "ratio_mean": float(seen.log_ratio.double().exp().mean()),
        "log_ratio_squared": float(seen.log_ratio.double().square().mean()),
        "clip_share_high": float(seen.high.double().mean()),
        "clip_share_low": float(seen.low.double().mean()),
        **_distance(seen.log_ratio, seen.high | seen.low),
        **by_lag,
    }


def _distance(log_ratio: torch.Tensor, held: torch.Tensor) -> dict[str, float]:
    """Of some tokens, at least one: how far they are from who sampled them. `held`: which the loss holds back."""
    ratio = log_ratio.double().exp()
    return {
        "ratio_p99": float(ratio.kthvalue(math.ceil(0.99 * len(ratio))).values),
        "ess": effective_sample_size(log_ratio),
        "mismatch_kl": float((ratio - 1 - log_ratio.double()).mean()),
        "clip_share": float(held.double().mean()),
    }


def lag_metrics(groups: Sequence[Group], advantages: Sequence[Sequence[float]], t: int) -> dict[str, float]:
    """`{name}_lag_{k}` of rollouts with the version lag k = t − x, x the version of a rollout's oldest token; for
    `zero_variance_share` of groups, x the version of a group's."""
    rollouts: dict[int, list[tuple[Rollout, float]]] = {}
    signals: dict[int, list[bool]] = {}
    for group, values in zip(groups, advantages, strict=True):
        signals.setdefault(t - group.oldest_version, []).append(group.signal)
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            rollouts.setdefault(t - rollout.oldest_version, []).append((rollout, advantage))
    found = {f"zero_variance_share_lag_{lag}": 1 - sum(s) / len(s) for lag, s in signals.items()}
    for lag, pairs in rollouts.items():
        own = [r for r, _ in pairs]
        tokens = max(1, sum(r.own_tokens for r in own))
        numbers = {
            "reward": statistics.fmean(r.reward for r in own),
            "advantage_std": statistics.pstdev(a for _, a in pairs),
            # What the environment wrote has the log-prob 0.
            "entropy": -sum(sum(r.logprobs) for r in own) / tokens,
            "truncated_share": sum(r.finish_reason == "length" for r in own) / len(own),
            "completion_tokens_mean": tokens / len(own),
        }
        found |= {f"{name}_lag_{lag}": value for name, value in numbers.items()}
    return found


def node_metrics(log_ratio: torch.Tensor, owners: Sequence[tuple[str, int]]) -> dict[str, float]:
    """`mismatch_kl_node_{id}`, as `mismatch_kl` but over the tokens of one node; of the nodes with the largest.

    `owners`: node and number of tokens of one answer after the other. An engine that computes other log-probs than the
    learner, or a node that lies, shows here. Unknown nodes are left out.
    """
    kl = log_ratio.double().exp() - 1 - log_ratio.double()
    found: dict[str, tuple[float, int]] = {}
    sums = torch.split(kl, [tokens for _, tokens in owners]) if owners else ()
    for (node, tokens), part in zip(owners, sums, strict=True):
        if node:
            total, count = found.get(node, (0.0, 0))
            found[node] = (total + float(part.sum()), count + tokens)
    means = {node: total / count for node, (total, count) in found.items()}
    worst = sorted(means, key=lambda node: (-means[node], node))[:_NODES]
    return {f"mismatch_kl_node_{node}": means[node] for node in sorted(worst)}


def advantage_metrics(advantages: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the advantages of the step's rollouts spread: 0 when no group has a signal."""
    values = [a for group in advantages for a in group]
    return {"advantage_std": statistics.pstdev(values), "advantage_max": max(map(abs, values))}


def _reference(seen: Seen) -> dict[str, float]:
    return {} if seen.reference_kl is None else {"reference_kl": seen.reference_kl / max(1, len(seen.log_ratio))}


_NODES = 32
"""Nodes that a step names: a job can have thousands."""
_SHARES = ("clip_share", "clip_share_high", "clip_share_low")
_ONES = ("ratio_mean", "ratio_p99", "ess")
