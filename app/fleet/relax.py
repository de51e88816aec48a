"""The linear relaxation of the cheapest cover: a bound, a price for a slot, and which machines still matter. Pure.

Invariant: `bound` is never above the cost of any set that covers the need in the slots with one offer per machine;
what `core` leaves out can't be in a set that is cheaper than `limit`, what it fixes is in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDS = 60
"""The dual is piecewise linear and its lines are cut one by one; a dozen is usual."""


@dataclass(frozen=True, slots=True)
class Items:
    """Offers sorted by machine: price and throughput, both as numbers ≥ 0, and where each machine begins."""

    price: Floats
    mu: Floats
    """At most the need: more is worth no more."""
    starts: Ints
    machine: Ints
    """Row of the machine of each offer."""

    @classmethod
    def of(cls, prices: Sequence[int], mus: Sequence[float], machines: Sequence[str], need: float) -> Items:
        """From offers that are sorted by machine."""
        change = [i for i, name in enumerate(machines) if i == 0 or name != machines[i - 1]]
        starts = np.array(change, dtype=np.int64)
        sizes = np.diff(np.append(starts, len(machines)))
        rows = np.repeat(np.arange(len(starts)), sizes)
        return cls(np.array(prices, dtype=np.float64), np.minimum(np.array(mus), need), starts, rows)


@dataclass(frozen=True, slots=True)
class Pick:
    """The best set for one price of throughput: the line that it contributes to the dual."""

    chosen: Ints
    cost: float
    mu: float
    slot_price: float
    """What one slot more would save."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The relaxation at its best prices."""

    bound: float
    mu_price: float
    slot_price: float
    low: Pick
    """Its set falls short of the need."""
    high: Pick
    """Its set covers the need."""


def _best_of_each(items: Items, value: Floats) -> tuple[Floats, Ints]:
    """The least value of each machine, and the first offer that has it."""
    least = np.minimum.reduceat(value, items.starts)
    at = np.flatnonzero(value == least[items.machine])
    first = np.empty(len(items.starts), dtype=np.int64)
    # Written backwards, so that the first one stays.
    first[items.machine[at[::-1]]] = at[::-1]
    return least, first


def pick(items: Items, mu_price: float, slots: int) -> Pick:
    """At a price for throughput: the machines that earn most, at most `slots` of them, each by its best offer."""
    earn, first = _best_of_each(items, items.price - mu_price * items.mu)
    order = np.argsort(earn, kind="stable")
    count = min(slots, int(np.searchsorted(earn[order], 0.0)))
    spare = float(earn[order[count]]) if count < len(order) else 0.0
    return _picked(items, first[order[:count]], max(0.0, -spare))


def fastest(items: Items, slots: int) -> Pick:
    """The set with the most throughput."""
    least, first = _best_of_each(items, -items.mu)
    return _picked(items, first[np.argsort(least, kind="stable")[:slots]], 0.0)


def _picked(items: Items, chosen: Ints, slot_price: float) -> Pick:
    return Pick(chosen, float(items.price[chosen].sum()), float(items.mu[chosen].sum()), slot_price)


def relax(items: Items, need: float, slots: int) -> Relaxed:
    """Maximise the dual over the price of throughput. The fastest set has to cover the need."""
    low, high = _picked(items, np.array([], dtype=np.int64), 0.0), fastest(items, slots)
    best = (0.0, 0.0, 0.0)
    for _ in range(ROUNDS):
        if high.mu <= low.mu:
            break
        price = max(0.0, (high.cost - low.cost) / (high.mu - low.mu))
        line = low.cost + price * (need - low.mu)
        now = pick(items, price, slots)
        value = now.cost + price * (need - now.mu)
        best = max(best, (value, price, now.slot_price))
        if value >= line - 1e-9 * max(1.0, abs(line)):
            break
        low, high = (low, now) if now.mu >= need else (now, high)
    return Relaxed(*best, low, high)


def core(items: Items, relaxed: Relaxed, limit: float) -> tuple[Ints, Ints]:
    """(offers that every set cheaper than `limit` has, offers that some such set may have besides)."""
    room = limit - relaxed.bound
    earn = items.price - relaxed.mu_price * items.mu + relaxed.slot_price
    least, first = _best_of_each(items, earn)
    others = earn.copy()
    others[first] = np.inf
    second = np.minimum.reduceat(others, items.starts)
    must = np.minimum(second, 0.0) - least > room
    may = earn - np.minimum(least, 0.0)[items.machine] < room
    return first[must], np.flatnonzero(may & ~must[items.machine])
