"""The budget is a promise. Pure.

Invariant: spent + what is open + what it costs to wind everything down never exceeds the budget, as far as prices are
known when a decision is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exposure:
    """Money of a job, micro-dollars."""

    budget: int
    spent: int
    """Ledger entries and what has accrued since."""
    burn_micros_h: int
    """All open leases together, traffic included."""
    pending_micros_h: int = 0
    """Leases whose fate is not known yet: they may cost as much as asked for."""
    wind_down_s: float = 120.0
    """How long it takes to checkpoint, drain and give everything back."""
    unseen: int = 0
    """What leases may have cost of which nothing told yet: since they were asked for, and for what their start
    downloads."""

    @property
    def wind_down(self) -> int:
        """What it costs to end now."""
        return math.ceil((self.burn_micros_h + self.pending_micros_h) * self.wind_down_s / 3600)

    @property
    def committed(self) -> int:
        """Spent, accrued and the cost of winding down."""
        return self.spent + self.unseen + self.wind_down

    @property
    def remaining(self) -> int:
        """What may still be committed."""
        return self.budget - self.committed


def can_rent(exposure: Exposure, price_micros_h: int, minimum_s: float, once: int = 0) -> bool:
    """Whether one more lease at this price can start for `once`, run for `minimum_s`, beside the others, and be wound
    down within the promise: else the last dollars would buy a machine that ends the job at once."""
    others = exposure.burn_micros_h + exposure.pending_micros_h
    cost = price_micros_h * (minimum_s + exposure.wind_down_s) + others * minimum_s + once * 3600
    return cost <= exposure.remaining * 3600


def spare_rate(exposure: Exposure, minimum_s: float) -> int:
    """By how much what burns may rise, micro-dollars per hour, so that all of it can still run for `minimum_s` and be
    wound down within the promise; at least 0."""
    others = exposure.burn_micros_h + exposure.pending_micros_h
    left = exposure.remaining * 3600 - others * minimum_s
    return max(0, math.floor(left / (minimum_s + exposure.wind_down_s)))


def must_wind_down(exposure: Exposure, margin_s: float) -> bool:
    """Whether the job has to end now: less is left than burns in the next `margin_s` seconds. A lease whose fate is
    unknown may burn."""
    burn = exposure.burn_micros_h + exposure.pending_micros_h
    return burn > 0 and exposure.remaining <= burn * margin_s / 3600
