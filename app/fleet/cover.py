"""The cheapest set of machines that delivers a throughput. Pure.

Invariant: what `cheapest_cover` returns holds at most `slots` machines and one offer per machine, covers the need
whenever some such set does, and never costs more than the paper's prefix rule where that covers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SEARCH_STEPS = 6000
"""Bound of the search: some 10 ms. Beyond it the best set so far is taken."""
FAST_ENOUGH = 0.6
"""Share of the fastest machine's throughput that counts as fast when slots are scarce."""
GAP = 1e-3
"""A set this much dearer than the cheapest is as good as it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An offer or a running lease: effective micro-dollars per hour, effective rollouts per second."""

    key: str
    machine: str
    price: int
    mu: float

    @property
    def rho(self) -> float:
        """Unit cost, micro-dollars per hour for one rollout per second."""
        return self.price / self.mu if self.mu > 0 else float("inf")


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

    A bounded branch and bound: exact for tens of offers, within GAP or the SEARCH_STEPS otherwise. It starts from the
    better of the prefixes, each closed by the cheapest single machine that covers the rest, and of the fastest set.
    """
    if need <= 0 or slots <= 0:
        return []
    best = prefix(candidates, need, slots)
    if _total(best) < need:
        # Cheap first among the equally fast.
        best = _one_each(sorted(candidates, key=lambda c: (-c.mu, c.price, c.key)))[:slots]
        if _total(best) < need:
            return _scarce(candidates, slots)
    best = _trim(best, need)
    # More throughput than the need is worth no more than the need.
    rates = [(c.price / min(c.mu, need), c.price, c.key, c) for c in candidates if c.mu > 0]
    rates.sort(key=lambda rate: rate[:3])
    ranked = _worth_a_look([c for *_, c in rates], need, _cost(best))
    best = min([best, *_closed_prefixes(_one_each(ranked), need, slots)], key=_cost)
    return _Search(_worth_a_look(ranked, need, _cost(best)), need, slots, best).run()


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


def _closed_prefixes(ranked: Sequence[Candidate], need: float, slots: int) -> list[list[Candidate]]:
    """Every prefix of the ranking, closed by the cheapest machine that covers the rest; without what is not needed."""
    by_mu = sorted(ranked, key=lambda c: c.mu)
    speeds = [c.mu for c in by_mu]
    cheapest: list[Candidate] = by_mu[:]
    """Of those at least as fast."""
    for i in reversed(range(len(by_mu) - 1)):
        cheapest[i] = min(by_mu[i], cheapest[i + 1], key=lambda c: (c.price, c.key))
    covers: list[list[Candidate]] = []
    total, cost, least = 0.0, 0, None
    for kept, following in enumerate(ranked[:slots]):
        at = bisect_left(speeds, need - total)
        last = cheapest[at] if at < len(by_mu) else None
        if last is not None and (least is None or cost + last.price < least) and last not in ranked[:kept]:
            chosen = [*ranked[:kept], last]
            if _total(chosen) >= need:
                least = cost + last.price
                covers.append(_trim(chosen, need))
        total += following.mu
        cost += following.price
        if total >= need:
            break
    return covers


def _worth_a_look(ranked: Sequence[Candidate], need: float, cost: int) -> list[Candidate]:
    """Those that can be in a cheaper set: the linear relaxation plus what the machine adds to it is below `cost`."""
    bound, rest, rate = 0.0, need, 0.0
    for c in ranked:
        rate = c.price / min(c.mu, need)
        part = min(min(c.mu, need), rest)
        bound += part * rate
        rest -= part
        if rest <= 0:
            break
    return [c for c in ranked if bound + c.price - rate * min(c.mu, need) < cost]


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


class _Search:
    """Depth-first over the ranking, the cheapest unit cost first, cut by the linear relaxation."""

    def __init__(self, ranked: Sequence[Candidate], need: float, slots: int, best: list[Candidate]) -> None:
        self.items = ranked
        self.need = need
        self.slots = slots
        self.best = best
        self.cost = _cost(best)
        self.mu = [min(c.mu, need) for c in ranked]
        self.sum_mu = [0.0, *accumulate(self.mu)]
        self.sum_price = [0, *accumulate(c.price for c in ranked)]
        self.most = max(self.mu, default=0.0)
        self.other = self._next_other(ranked)

    def run(self) -> list[Candidate]:
        """The best set found."""
        path: list[int] = []
        taken: set[str] = set()
        at, rest, cost = 0, self.need, 0
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
                    rest, cost, at = rest - self.mu[at], cost + self.items[at].price, at + 1
            elif path:
                left = path.pop()
                taken.remove(self.items[left].machine)
                rest, cost, at = rest + self.mu[left], cost - self.items[left].price, self.other[left]
            else:
                break
        return self.best

    def _promising(self, at: int, rest: float, cost: int, depth: int) -> bool:
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
        bound = cost + more + more_mu * self.items[last].price / self.mu[last]
        return bound < self.cost * (1 - GAP)

    def _record(self, path: Sequence[int]) -> None:
        chosen = [self.items[i] for i in path]
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
