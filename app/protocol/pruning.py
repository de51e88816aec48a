"""Which samples of a group are worth sending: pairs of best and worst (Shuffle-R1, arXiv 2508.05612). Pure.

Invariant: how many are kept depends on the size of the group alone, so that both sides know it; what is kept has the
best and the worst sample of the group.

Sorted by advantage (in a group: by reward), the best is paired with the worst, the second best with the second worst
and so on inwards; the first half of the pairs is kept, as its authors' code does (`custom_algos.py`). What is left out
are samples near the group's mean. The learner then takes mean and spread of what was kept: a bias, which
docs/learner.md says more about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Prune = Literal["shuffle_r1"]


def kept(group_size: int, prune: Prune | None) -> int:
    """Samples that a file has of a group of `group_size`: those of the first half of its pairs, one pair at least."""
    return group_size if prune is None else min(group_size, 2 * max(1, math.ceil(group_size // 2 / 2)))


def informative(rewards: Sequence[float], prune: Prune | None) -> list[int]:
    """Indices of the samples to send, ascending. Among equal rewards the lower index counts as the better one."""
    if prune is None:
        return list(range(len(rewards)))
    pairs = kept(len(rewards), prune) // 2
    ranked = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    return sorted(ranked[:pairs] + ranked[len(ranked) - pairs :]) if pairs else list(range(len(rewards)))
