"""The cheapest set of machines that delivers a throughput. Pure.

Invariant: what `cheapest_cover` returns holds at most `slots` machines and one offer per machine, covers the need
whenever some such set does, and never costs more than the paper's prefix rule where that covers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from app.fleet import relax
from app.fleet.branching import GAP, Rest, Search
from app.fleet.candidates import Candidate, mu_of, price_of

FAST_ENOUGH = 0.6
"""Share of the fastest machine's throughput that counts as fast when slots are scarce."""
CLOSED = 12
"""So many of the longest prefixes of the relaxation's set are tried with one machine for the rest."""
EXCHANGES = 60
REFINEMENTS = 3
"""A better set makes fewer offers matter: the search is run again on those."""


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
    if mu_of(fast) < need:
        return _scarce(candidates, slots)
    shelf = _Shelf.of(useful)
    relaxed = relax.relax(items, need, slots)
    starts = [_trim(fast, need), *_closed(useful, shelf, relaxed, need, slots)]
    simple = prefix(candidates, need, slots)
    if mu_of(simple) >= need:
        starts.append(_trim(simple, need))
    best = min((shelf.exchange(s, need) for s in starts), key=price_of)
    for _ in range(REFINEMENTS):
        if price_of(best) <= relaxed.bound * (1 + GAP):
            break
        fixed, open_ = relax.core(items, relaxed, price_of(best))
        rest = Rest([useful[i] for i in fixed], [useful[i] for i in open_])
        found = shelf.exchange(Search(rest, need, slots, relaxed.slot_price, best).run(), need)
        if price_of(found) >= price_of(best):
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
        last = shelf.cheapest(need - mu_of(chosen), {c.machine for c in chosen})
        if last is not None:
            covers.append([*chosen, last])
    return [_trim(c, need) for c in covers if mu_of(c) >= need]


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
            total, used = mu_of(chosen), {c.machine for c in chosen}
            best: tuple[int, int, Candidate] | None = None
            for at, old in enumerate(chosen):
                new = self.cheapest(need - (total - old.mu), used - {old.machine}, old.price)
                if new is not None and (best is None or old.price - new.price > best[0]):
                    best = (old.price - new.price, at, new)
            if best is None:
                break
            after = [*chosen[: best[1]], best[2], *chosen[best[1] + 1 :]]
            # The sum decides: the difference may be off by the last bit.
            if mu_of(after) < need:
                break
            chosen = _trim(after, need)
        return chosen


def _trim(chosen: list[Candidate], need: float) -> list[Candidate]:
    """Without machines that the cover does not need, dearest first."""
    spare = mu_of(chosen) - need
    for c in sorted(chosen, key=lambda c: (-c.price, c.key)):
        # The sum decides: what is spare may be off by the last bit.
        if c.mu <= spare and mu_of(fewer := [k for k in chosen if k is not c]) >= need:
            chosen, spare = fewer, spare - c.mu
    return chosen
