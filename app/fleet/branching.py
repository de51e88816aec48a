"""The last word on a cover: branch and bound over the machines that still matter. Pure.

Invariant: what `Search.run` returns covers the need and costs no more than the set that it began with; it ends after
SEARCH_STEPS.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.fleet.candidates import Candidate, mu_of, price_of

SEARCH_STEPS = 6000
"""Bound of the search: some 10 ms. Beyond it the best set so far is taken."""
GAP = 1e-3
"""A set this much dearer than the cheapest is as good as it."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What the search still has to decide."""

    fixed: list[Candidate]
    open: list[Candidate]


class Search:
    """Depth-first over what is open, the cheapest unit cost first, cut by the linear relaxation in which a slot has
    its price."""

    def __init__(self, rest: Rest, need: float, slots: int, slot_price: float, best: list[Candidate]) -> None:
        self.fixed = rest.fixed
        self.need = need
        self.missing = max(0.0, need - mu_of(rest.fixed))
        self.slots = slots - len(rest.fixed)
        self.best = best
        self.cost = price_of(best)
        self.base = price_of(rest.fixed) - slot_price * self.slots
        # More throughput than is missing is worth no more than what is missing.
        missing = self.missing or 1.0
        rated = [(c.price + slot_price, min(c.mu, missing), c) for c in rest.open]
        rated.sort(key=lambda r: (r[0] / r[1], r[0], r[2].key))
        self.items = [c for _, _, c in rated]
        self.price = [p for p, _, _ in rated]
        self.mu = [m for _, m, _ in rated]
        self.sum_mu = [0.0, *accumulate(self.mu)]
        self.sum_price = [0.0, *accumulate(self.price)]
        self.most = max(self.mu, default=0.0)
        self.other = self._next_other(self.items)

    def run(self) -> list[Candidate]:
        """The best set found."""
        if self.missing <= 0:
            self._record([])
            return self.best
        path: list[int] = []
        taken: set[str] = set()
        at, rest, cost = 0, self.missing, self.base
        for _ in range(SEARCH_STEPS):
            if at < len(self.items) and len(path) < self.slots and self._promising(at, rest, cost, len(path)):
                if self.items[at].machine in taken:
                    at += 1
                elif self.mu[at] >= rest:
                    self._record([*path, at])
                    at += 1
                else:
                    path.append(at)
                    taken.add(self.items[at].machine)
                    rest, cost, at = rest - self.mu[at], cost + self.price[at], at + 1
            elif path:
                left = path.pop()
                taken.remove(self.items[left].machine)
                rest, cost, at = rest + self.mu[left], cost - self.price[left], self.other[left]
            else:
                break
        return self.best

    def _promising(self, at: int, rest: float, cost: float, depth: int) -> bool:
        """Whether the items from `at` on can complete the path for less than the best."""
        if rest > self.most * (self.slots - depth) * (1 + GAP):
            return False
        goal = self.sum_mu[at] + rest
        end = bisect_left(self.sum_mu, goal * (1 - 1e-12))
        if end > len(self.items):
            return False
        last = end - 1
        more = self.sum_price[last] - self.sum_price[at]
        more_mu = goal - self.sum_mu[last]
        bound = cost + more + more_mu * self.price[last] / self.mu[last]
        return bound < self.cost * (1 - GAP)

    def _record(self, path: Sequence[int]) -> None:
        chosen = [*self.fixed, *(self.items[i] for i in path)]
        if price_of(chosen) < self.cost and mu_of(chosen) >= self.need:
            self.best, self.cost = chosen, price_of(chosen)

    @staticmethod
    def _next_other(ranked: Sequence[Candidate]) -> list[int]:
        """For each item the next one that makes a difference: a copy of the one just tried makes none."""
        offers = Counter(c.machine for c in ranked)
        other = [at + 1 for at in range(len(ranked))]
        for at in reversed(range(len(ranked) - 1)):
            this, that = ranked[at], ranked[at + 1]
            alike = (this.price, this.mu) == (that.price, that.mu)
            if alike and offers[this.machine] == offers[that.machine] == 1:
                other[at] = other[at + 1]
        return other
