"""Advantages within a group.

Invariant: a group whose rewards are all equal has advantage exactly 0, so that it can be left out of the backward pass
without changing the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.protocol.learner_spec import RewardScale

EPSILON = 1e-4


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's group-normalised advantage of each rollout of one prompt (DeepSeekMath, arXiv 2402.03300, §4.1.2).

    Â_i = (r_i − mean(r)) / (std(r) + ε), with the sample standard deviation (n − 1) and ε = 1e-4. One reward, or all
    rewards equal: zeros.
    """
    return batch_advantages([rewards], "group")[0]


def batch_advantages(groups: Sequence[Sequence[float]], scale: RewardScale) -> list[list[float]]:
    """Advantages of all groups of a step, Â_i = (r_i − mean of its group) / D.

    `group`: D = std of the group + ε (GRPO). `none`: D = 1 (Dr. GRPO, arXiv 2503.20783: dividing by the group's
    deviation gives prompts that are nearly always or nearly never solved more weight than others). `batch`: D = std of
    all rewards of the step + ε (arXiv 2508.08221). Sample deviations (n − 1), ε = 1e-4.
    """
    values = [np.asarray(rewards, dtype=np.float64) for rewards in groups]
    whole = _deviation(np.concatenate(values)) if values else 0.0
    return [_advantages(v, scale, whole) for v in values]


def _advantages(values: np.ndarray, scale: RewardScale, whole: float) -> list[float]:
    if len(values) < 2 or (values == values[0]).all():
        return [0.0] * len(values)
    deviation = whole if scale == "batch" else _deviation(values)
    advantages: list[float] = ((values - values.mean()) / (1.0 if scale == "none" else deviation + EPSILON)).tolist()
    return advantages


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
