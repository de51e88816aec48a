"""The cheapest set of machines that delivers a throughput. Pure.

Invariant: what `cheapest_cover` returns holds at most `slots` machines and one offer per machine, covers the need
whenever some such set does, and never costs more than the paper's prefix rule where that covers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from app.fleet import relax

SEARCH_STEPS = 6000
"""Bound of the search: some 10 ms. Beyond it the best set so far is taken."""
FAST_ENOUGH = 0.6
"""Share of the fastest machine's throughput that counts as fast when slots are scarce."""
CLOSED = 12
"""So many of the longest prefixes of the relaxation's set are tried with one machine for the rest."""
EXCHANGES = 60
REFINEMENTS = 3
"""A better set makes fewer offers matter: the search is run again on those."""
GAP = 1e-3
"""A set this much dearer than the cheapest is as good as it."""


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

    @property
    def rho(self) -> float:
        """Unit cost, micro-dollars per hour for one rollout per second."""
        return self.price / self.mu if self.mu > 0 else float("inf")


def band(
    price: NDArray[np.float64] | NDArray[np.int64], mu: NDArray[np.float64], machines: Sequence[str], depth: int
) -> NDArray[np.bool_]:
    """Which offers can be in a cheapest set of up to `depth` machines.

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
        (heapq.heappush if len(best) < depth else heapq.heappushpop)(best, rate)
    return kept


def prefix(candidates: Sequence[Candidate], need: float, slots: int) -> list[Candidate]:
    """The paper's rule: the cheapest ρ first until Σμ ≥ need."""
    chosen: list[Candidate] = []
    total = 0.0
    for c in _one_each(sorted(candidates, key=lambda c: (c.rho, c.price, c.key))):
        if total >= need or len(chosen) >= slots:
            break
        chosen.append(c)
        total += c.mu
    return chosen


def cheapest_cover(candidates: Sequence[Candidate], need: float, slots: int) -> list[Candidate]:
    """The cheapest set with Σμ ≥ need in at most `slots` machines; cheap fast ones if none covers it.

    The linear relaxation gives a bound, a price for a slot and two sets that lie next to the optimum; the better of
    those, of the prefixes and of the fastest set, each improved by exchanges, says which offers still matter; a
    bounded branch and bound looks through them. Exact for tens of offers, within GAP or the SEARCH_STEPS otherwise.
    """
    if need <= 0 or slots <= 0:
        return []
    useful = sorted((c for c in candidates if c.mu > 0), key=lambda c: (c.machine, c.price, c.key))
    items = relax.Items.of([c.price for c in useful], [c.mu for c in useful], [c.machine for c in useful], need)
    fast = [useful[i] for i in relax.fastest(items, slots).chosen] if useful else []
    if _total(fast) < need:
        return _scarce(candidates, slots)
    shelf = _Shelf.of(useful)
    relaxed = relax.relax(items, need, slots)
    starts = [_trim(fast, need), *_closed(useful, shelf, relaxed, need, slots)]
    simple = prefix(candidates, need, slots)
    if _total(simple) >= need:
        starts.append(_trim(simple, need))
    best = min((shelf.exchange(s, need) for s in starts), key=_cost)
    for _ in range(REFINEMENTS):
        if _cost(best) <= relaxed.bound * (1 + GAP):
            break
        fixed, open_ = relax.core(items, relaxed, _cost(best))
        rest = _Rest([useful[i] for i in fixed], [useful[i] for i in open_])
        found = shelf.exchange(_Search(rest, need, slots, relaxed.slot_price, best).run(), need)
        if _cost(found) >= _cost(best):
            break
        best = found
    return sorted(best, key=lambda c: (c.rho, c.price, c.key))


def _scarce(candidates: Sequence[Candidate], slots: int) -> list[Candidate]:
    """What to take when nothing covers the need: slots are scarce, so fast machines, the cheapest ρ of those first.

    The plain fastest would pay any price for the last percent.
    """
    machines = _one_each(sorted(candidates, key=lambda c: (-c.mu, c.price, c.key)))
    fast = FAST_ENOUGH * max((c.mu for c in machines), default=0.0)
    return sorted(machines, key=lambda c: (c.mu < fast, c.rho if c.mu >= fast else -c.mu, c.price, c.key))[:slots]


def _one_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of each machine, without those that do nothing."""
    first: dict[str, Candidate] = {}
    for c in candidates:
        if c.mu > 0:
            first.setdefault(c.machine, c)
    return list(first.values())


def _closed(
    useful: Sequence[Candidate], shelf: _Shelf, relaxed: relax.Relaxed, need: float, slots: int
) -> list[list[Candidate]]:
    """Covers that lie next to the relaxation's: the set that covers, and prefixes of the one that does not quite,
    each closed by the cheapest machine that does the rest."""
    low = sorted((useful[i] for i in relaxed.low.chosen), key=lambda c: (c.rho, c.price, c.key))
    covers = [[useful[i] for i in relaxed.high.chosen]]
    for kept in range(max(0, len(low) - CLOSED), min(len(low), slots - 1) + 1):
        chosen = low[:kept]
        last = shelf.cheapest(need - _total(chosen), {c.machine for c in chosen})
        if last is not None:
            covers.append([*chosen, last])
    return [_trim(c, need) for c in covers if _total(c) >= need]


@dataclass(frozen=True, slots=True)
class _Shelf:
    """All offers, the cheapest first."""

    offers: list[Candidate]
    mu: relax.Floats
    most: relax.Floats
    """The largest throughput up to each."""

    @classmethod
    def of(cls, useful: Sequence[Candidate]) -> _Shelf:
        """From offers in any order that does not depend on how they came."""
        order = np.argsort(np.array([c.price for c in useful]), kind="stable")
        offers = [useful[i] for i in order]
        mu = np.array([c.mu for c in offers])
        return cls(offers, mu, np.maximum.accumulate(mu))

    def cheapest(self, least: float, used: Collection[str], below: int | None = None) -> Candidate | None:
        """The cheapest offer of at least so much throughput on a machine that is not used, if it costs less."""
        at = int(np.searchsorted(self.most, least))
        while at < len(self.offers):
            found = self.offers[at]
            if below is not None and found.price >= below:
                return None
            if found.machine not in used:
                return found
            later = self.mu[at + 1 :] >= least
            if not later.any():
                return None
            at += 1 + int(later.argmax())
        return None

    def exchange(self, chosen: list[Candidate], need: float) -> list[Candidate]:
        """Exchange one machine for a cheaper one, what saves most first, as long as the need stays covered."""
        for _ in range(EXCHANGES):
            total, used = _total(chosen), {c.machine for c in chosen}
            best: tuple[int, int, Candidate] | None = None
            for at, old in enumerate(chosen):
                new = self.cheapest(need - (total - old.mu), used - {old.machine}, old.price)
                if new is not None and (best is None or old.price - new.price > best[0]):
                    best = (old.price - new.price, at, new)
            if best is None:
                break
            after = [*chosen[: best[1]], best[2], *chosen[best[1] + 1 :]]
            # The sum decides: the difference may be off by the last bit.
            if _total(after) < need:
                break
            chosen = _trim(after, need)
        return chosen


def _trim(chosen: list[Candidate], need: float) -> list[Candidate]:
    """Without machines that the cover does not need, dearest first."""
    spare = _total(chosen) - need
    for c in sorted(chosen, key=lambda c: (-c.price, c.key)):
        # The sum decides: what is spare may be off by the last bit.
        if c.mu <= spare and _total(fewer := [k for k in chosen if k is not c]) >= need:
            chosen, spare = fewer, spare - c.mu
    return chosen


def _total(chosen: Sequence[Candidate]) -> float:
    return sum(c.mu for c in chosen)


def _cost(chosen: Sequence[Candidate]) -> int:
    return sum(c.price for c in chosen)


@dataclass(frozen=True, slots=True)
class _Rest:
    """What the search still has to decide."""

    fixed: list[Candidate]
    open: list[Candidate]


class _Search:
    """Depth-first over what is open, the cheapest unit cost first, cut by the linear relaxation in which a slot has
    its price."""

    def __init__(self, rest: _Rest, need: float, slots: int, slot_price: float, best: list[Candidate]) -> None:
        self.fixed = rest.fixed
        self.need = need
        self.missing = max(0.0, need - _total(rest.fixed))
        self.slots = slots - len(rest.fixed)
        self.best = best
        self.cost = _cost(best)
        self.base = _cost(rest.fixed) - slot_price * self.slots
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
        if _cost(chosen) < self.cost and _total(chosen) >= self.need:
            self.best, self.cost = chosen, _cost(chosen)

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
