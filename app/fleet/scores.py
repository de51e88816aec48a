"""What an evaluation by the fleet says. Pure.

Invariant: pass@k is the unbiased estimate from n ≥ k samples of each prompt (Chen et al., 2021, HumanEval):
the mean over prompts of 1 − C(n − c, k) / C(n, k), c the right ones among n.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RIGHT = 1.0 - 1e-6
"""A reward from here on counts as a right answer."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one version on the held-out prompts."""

    reward: float
    """Mean reward of the sampled answers: what the learner's own evaluation measures."""
    pass_at_1: float
    pass_at_k: float
    k: int
    """Answers sampled of each prompt."""
    greedy: float | None
    """Mean reward of the most likely answers, if they were asked for."""
    prompts: int


def pass_at(n: int, right: int, k: int) -> float:
    """Chance that at least one of k answers is right, from n answers of which `right` are. Raises ValueError."""
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} of {n} answers with {right} right ones makes no sense")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def score(sampled: Sequence[Sequence[float]], greedy: Sequence[float]) -> Scores:
    """Rewards of the sampled answers by prompt, and of the greedy ones. There must be at least one sampled prompt."""
    k = min(len(rewards) for rewards in sampled)
    right = [(len(rewards), sum(r >= RIGHT for r in rewards)) for rewards in sampled]
    return Scores(
        reward=statistics.fmean(statistics.fmean(rewards) for rewards in sampled),
        pass_at_1=statistics.fmean(pass_at(n, c, 1) for n, c in right),
        pass_at_k=statistics.fmean(pass_at(n, c, k) for n, c in right),
        k=k,
        greedy=statistics.fmean(greedy) if greedy else None,
        prompts=len(sampled),
    )


def due(version: int, every: int, last: int) -> bool:
    """Whether v_version is to be evaluated: the first that was published at or after a multiple of `every` steps."""
    return version > 0 and version // every > last // every


def goes_first(waited_s: float, period_s: float, *, ready: int, prompts: int, answers: int, rollouts: int) -> bool:
    """Whether held-out prompts are handed out before training prompts.

    At first they get what admission leaves idle. Once they have waited for two publish periods, their version is nearly
    gone from the nodes: they go first while the learner has a batch of `prompts` groups `ready`, and otherwise are a
    quarter of what is under way (`answers` to them, `rollouts` to train on), so that it does not wait for them.
    """
    return waited_s > 2 * period_s and (ready >= prompts or 3 * answers <= rollouts)
