"""What a set of machines is chosen from. Pure.

Invariant: an offer and a running lease are compared by the same three numbers, price, throughput and their ratio.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Candidate:
    """An offer or a running lease: effective micro-dollars per hour, effective rollouts per second."""

    key: str
    machine: str
    price: int
    mu: float
    usual: int | None = None
    """Its price over the last hour or so, where that is known: what a swing of the moment says nothing about."""
    start_s: float = 0.0
    """From renting it to its first rollout, seconds; 0 for one that runs."""
    pool: str = ""
    """The pool that it would come from, named as the machine of a lease from there; empty for a machine of its own."""

    @property
    def rho(self) -> float:
        """Unit cost, micro-dollars per hour for one rollout per second."""
        return self.price / self.mu if self.mu > 0 else float("inf")


def band(
    price: NDArray[np.float64] | NDArray[np.int64],
    mu: NDArray[np.float64],
    machines: Sequence[str],
    depth: int,
    pools: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Which offers can be in a cheapest set of up to `depth` machines. Of the `pools` among them any number can.

    One beside which `depth` other machines cost no more and do no less can't: one of those is free to take its place.
    """
    kept = np.zeros(len(price), dtype=bool)
    best: list[float] = []
    """The `depth` largest throughputs so far, of the cheapest offer of each machine."""
    seen: set[str] = set()
    rates = mu.tolist()
    for at in np.lexsort((-mu, price)).tolist():
        rate = rates[at]
        if len(best) >= depth and best[0] >= rate:
            continue
        kept[at] = rate > 0
        if machines[at] in seen:
            continue
        seen.add(machines[at])
        for _ in range(1 if pools is None or not pools[at] else depth):
            (heapq.heappush if len(best) < depth else heapq.heappushpop)(best, rate)
    return kept


def mu_of(chosen: Sequence[Candidate]) -> float:
    """Σμ, rollouts per second."""
    return sum(c.mu for c in chosen)


def price_of(chosen: Sequence[Candidate]) -> int:
    """Micro-dollars per hour."""
    return sum(c.price for c in chosen)
