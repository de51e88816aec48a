"""Advantages within a group.

Invariant: a group whose rewards are all equal has advantage exactly 0, so that it can be left out of the backward pass
without changing the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-4


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's group-normalised advantage of each rollout of one prompt (DeepSeekMath, arXiv 2402.03300, §4.1.2).

    Â_i = (r_i − mean(r)) / (std(r) + ε), with the sample standard deviation (n − 1) and ε = 1e-4. One reward, or all
    rewards equal: zeros.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or (values == values[0]).all():
        return [0.0] * len(values)
    advantages: list[float] = ((values - values.mean()) / (values.std(ddof=1) + EPSILON)).tolist()
    return advantages
