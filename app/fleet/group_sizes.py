"""How many completions each prompt of a window gets: `batch.group_policy`. Pure.

Invariant: the sizes of a window sum to exactly prompts × group size, so that a step that consumes a window of groups
consumes R rollouts; each lies within [least, most].

`uniform` is GRPO's. `cures` gives a budget in proportion to σ = √(p̂(1 − p̂)) with the posterior mean
p̂ = (acc + 1)/(all + 2), as the code of CurES has it (`epic/`); its full σ² also weighs the norms of gradients of right
and wrong answers, which nodes don't know: here they are taken as equal. **Experimental.** `coba` is made after the
description of CoBA-RL (arXiv 2602.03048): a value curve shaped like a Beta density whose parameters the global failure
rate drives, a saturation in the budget, and a greedy choice by marginal gain on a heap. Its exact curve is not
published: the one here is our own. **Experimental.**
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.protocol.job import GroupPolicy

CONCENTRATION = 4.0
"""coba: α + β − 2 of the value curve; greater is more peaked."""
SATURATION = 8.0
"""coba: completions after which a prompt has yielded about two thirds of its value."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of one prompt: completions so far, and how many of them were right (rewards, held to 0…1)."""

    successes: float = 0.0
    tries: int = 0

    @property
    def p(self) -> float:
        """Posterior mean of the success rate, uniform prior."""
        return (self.successes + 1) / (self.tries + 2)


def sizes(
    policy: GroupPolicy,
    prompts: Sequence[Tried],
    *,
    group_size: int,
    least: int,
    most: int,
    failure_rate: float | None = None,
) -> list[int]:
    """n_i of each prompt of a window. `failure_rate` is the job's smoothed one, None while nothing is known.

    Raises ValueError unless least ≤ group_size ≤ most.
    """
    if not 1 <= least <= group_size <= most:
        raise ValueError(f"group_size {group_size} must lie within [{least}, {most}]")
    total = group_size * len(prompts)
    if policy == "uniform" or not prompts:
        return [group_size] * len(prompts)
    if policy == "cures":
        return _proportional([math.sqrt(t.p * (1 - t.p)) for t in prompts], total, least, most)
    worths = [value(t.p, 0.5 if failure_rate is None else failure_rate) for t in prompts]
    return _greedy(lambda i, n: gain(worths[i], n), len(prompts), total, least, most)


def value(p: float, failure_rate: float) -> float:
    """coba: worth of a prompt with success rate `p`, in (0, 1]: a Beta curve over its mode.

    The mode is the success rate that is worth most. It lies at the failure rate, held to [0.25, 0.75]: a policy that
    fails often exploits what it nearly can, one that succeeds often explores what it can't yet.
    """
    mode = min(0.75, max(0.25, failure_rate))
    p = min(1 - 1e-6, max(1e-6, p))
    a, b = CONCENTRATION * mode, CONCENTRATION * (1 - mode)
    return math.exp(a * math.log(p / mode) + b * math.log((1 - p) / (1 - mode)))


def gain(worth: float, n: int) -> float:
    """coba: what the n-th completion (from 1 on) adds to a prompt's value; falls with n."""
    return worth * (math.exp(-(n - 1) / SATURATION) - math.exp(-n / SATURATION))


def _greedy(marginal: Callable[[int, int], float], count: int, total: int, least: int, most: int) -> list[int]:
    """`least` for everybody, the rest one by one to whom the next completion is worth most; ties: the lower index."""
    found = [least] * count
    heap = [(-marginal(i, least + 1), i) for i in range(count) if least < most]
    heapq.heapify(heap)
    for _ in range(total - least * count):
        _, i = heapq.heappop(heap)
        found[i] += 1
        if found[i] < most:
            heapq.heappush(heap, (-marginal(i, found[i] + 1), i))
    return found


def _proportional(weights: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Shares of `total` in proportion to the weights, within the bounds, by the highest average (Webster).

    The next completion goes where weight / (n + ½) is greatest: the integers nearest to the proportion, and a greater
    weight never has fewer.
    """
    return _greedy(lambda i, n: weights[i] / (n - 0.5), len(weights), total, least, most)
