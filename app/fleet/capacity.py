"""How much rollout throughput a job needs (paper Eq. 1 and 2). Pure.

Invariant: the target is never below R / T_train while it is known: a pool slower than the learner would make it wait
whatever the broadcast does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Capacity:
    """Answer of the capacity rule; rates in rollouts per second, None where there is none."""

    feasible: bool
    mu_min: float | None
    """κR / (κT_train − T_bcast); None when infeasible."""
    mu_target: float
    """γ·μ_min, or γ·R/T_train when Eq. 2 has no answer."""
    explanation: str

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def minimum_capacity(rollouts: int, kappa: int, t_train: float, t_bcast: float) -> float | None:
    """μ_min(κ) = κR / (κT_train − T_bcast), the paper's Eq. 2; None if κT_train ≤ T_bcast.

    `rollouts` is R, times are seconds.
    """
    window = kappa * t_train - t_bcast
    return kappa * rollouts / window if window > 0 else None


def plan(*, rollouts: int, kappa: int, staleness: int, gamma: float, t_train: float, t_bcast: float) -> Capacity:
    """What the fleet must deliver, and, when no fleet can, what would have to change.

    Eq. 2 supposes that nodes stall during a broadcast. Ours go on under the old version, so where Eq. 2 has no answer
    the job is still served with the consumption rate R/T_train: it says that it is infeasible, but does not stop.
    """
    mu_min = minimum_capacity(rollouts, kappa, t_train, t_bcast)
    if mu_min is not None:
        return Capacity(True, mu_min, gamma * mu_min, "")
    need = feasible_period(t_train, t_bcast)
    remedy = f"publish_period {need} with staleness_budget ≥ {need + 1} would be feasible"
    if need <= max(1, staleness - 1):
        remedy = f"publish_period {need} would be feasible within staleness_budget {staleness}"
    return Capacity(
        False,
        None,
        gamma * rollouts / t_train,
        f"infeasible: {kappa} steps of {t_train:.3g} s are not longer than a broadcast of {t_bcast:.3g} s; "
        f"{remedy}, or a broadcast below {kappa * t_train:.3g} s (smaller snapshots, faster links)",
    )


def feasible_period(t_train: float, t_bcast: float) -> int:
    """The smallest κ with κT_train > T_bcast: ⌊T_bcast/T_train⌋ + 1."""
    period = math.floor(t_bcast / t_train) + 1
    # The quotient may be off by its last bit, on either side.
    while period * t_train <= t_bcast:
        period += 1
    while period > 1 and (period - 1) * t_train > t_bcast:
        period -= 1
    return period


def bubble_ratio(idle_s: float, train_s: float) -> float | None:
    """T_idle / (T_idle + T_train,active); None before anything was trained."""
    total = idle_s + train_s
    return idle_s / total if total > 0 else None
