"""Offers as a job sees them: priced part by part, ranked by ρ. Pure.

Invariant: an offer that the job may not rent is listed with the reason, not hidden. Thousands of offers are priced in
columns; the `Priced` of one is made when somebody looks at it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import overload

import numpy as np
from numpy.typing import NDArray

from app.fleet import bids, pricing
from app.fleet.candidates import Candidate, band
from app.fleet.estimates import Estimate, estimate, prior
from app.fleet.priced import JobView, Known, Priced
from providers.base import Billing, Offer

MIN_LIFE_S = 1800.0
LEAD_S = 120.0

_FACTS = attrgetter(
    "compute_micros_h", "disk_micros_gb_month", "download_micros_gb", "upload_micros_gb", "down_mbps", "reliability"
)


@dataclass(frozen=True, slots=True)
class _Table:
    """All that was worked out, one row an offer."""

    offers: Sequence[Offer]
    view: JobView
    known: Known
    parts: pricing.Parts
    guesses: Sequence[Estimate]
    kind: NDArray[np.int64]
    availability: pricing.Floats
    mu: pricing.Floats
    rho: pricing.Floats
    lasting: pricing.Floats
    """Total at the usual price; NaN where that is not known."""
    reason: NDArray[np.int64]

    def priced(self, row: int) -> Priced:
        lasting = float(self.lasting[row])
        return Priced(
            self.offers[row], int(self.parts.compute[row]), self.parts[row], self.guesses[int(self.kind[row])],
            float(self.availability[row]), self._excluded(row), None if lasting != lasting else round(lasting),
            self.known.on_demand.get(row),
        )  # fmt: skip

    def _excluded(self, row: int) -> str:
        offer, fleet = self.offers[row], self.view.spec.fleet
        match int(self.reason[row]):
            case 0:
                return ""
            case 1:
                return f"gpu_names does not name {offer.gpu_name}"
            case 2:
                return f"reliability {offer.reliability:.3f} < min_reliability {fleet.min_reliability}"
            case 3:
                return f"over max_price_per_hour {fleet.max_price_per_hour}"
            case 4:
                return "a bid would have to be above the machine's on-demand price"
            case 5:
                return "the host ends the contract too soon"
            case 6:
                return f"its disk of {offer.disk_gb:g} GB is smaller than disk_gb {fleet.disk_gb:g}"
            case _:
                return self.known.barred[row]


class Ranking(Sequence[Priced]):
    """The market as a job sees it: what it may rent by ρ, then the rest."""

    def __init__(self, table: _Table, order: NDArray[np.int64]) -> None:
        self._table = table
        self._order = order
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, at: int) -> Priced: ...
    @overload
    def __getitem__(self, at: slice) -> list[Priced]: ...
    def __getitem__(self, at: int | slice) -> Priced | list[Priced]:
        if isinstance(at, slice):
            return [self._table.priced(int(row)) for row in self._order[at]]
        return self._table.priced(int(self._order[at]))

    @property
    def wanted(self) -> Ranking:
        """Those that the job may rent."""
        return Ranking(self._table, self._order[self._table.reason[self._order] == 0])

    def candidates(
        self, slots: int, *, most: float = float("inf"), allows: Callable[[str, int], bool] = lambda *_: True
    ) -> list[Candidate]:
        """Those that can be in a cheapest set of up to `slots` machines, as the decision sees them, by ρ.

        Each counts for at most `most` rollouts/s. `allows(provider, price)` says what may be paid; what it refuses, it
        refuses at any higher price.
        """
        table, rows = self._table, self._affordable(allows)
        price, mu = table.parts.total[rows], np.minimum(table.mu[rows], most)
        lasting = np.fmax(price, table.lasting[rows])
        offered = [table.offers[row] for row in rows.tolist()]
        pools = np.array([o.provider in table.view.pools for o in offered], dtype=bool)
        # What a pool is asked for besides, such as the number of cards, makes it another one.
        names = [
            f"{o.provider}:{o.offer_id if pooled else o.machine_id}"
            for o, pooled in zip(offered, pools.tolist(), strict=True)
        ]
        kept = band(price, mu, names, slots, pools)
        if not np.array_equal(price, lasting):
            kept |= band(lasting, mu, names, slots, pools)
        out = []
        for at in np.flatnonzero(kept).tolist():
            row, usual = int(rows[at]), float(table.lasting[rows[at]])
            one = Candidate(
                f"{offered[at].provider}:{offered[at].offer_id}", names[at], int(price[at]), float(mu[at]),
                None if usual != usual else round(usual), float(table.parts.start_s[row]),
            )  # fmt: skip
            machine = f"{offered[at].provider}:{offered[at].machine_id}"
            for made in _each_of(one, machine, slots) if pools[at] else (one,):
                self._rows[made.key] = row
                out.append(made)
        return out

    def of(self, key: str, worth: int | None = None) -> Priced:
        """The offer of a candidate. `worth`: what it may cost in all parts; a bid is cut to that, though not below its
        floor."""
        p = self._table.priced(self._rows[key])
        over = 0 if worth is None or p.offer.billing is not Billing.SPOT_BID else p.price.total - worth
        rate = max(p.rate_micros_h - over, p.offer.compute_micros_h) if over > 0 else p.rate_micros_h
        return replace(p, rate_micros_h=rate, price=replace(p.price, compute=rate))

    def _affordable(self, allows: Callable[[str, int], bool]) -> NDArray[np.int64]:
        offers, total = self._table.offers, self._table.parts.total
        providers = np.array([offers[row].provider for row in self._order.tolist()])
        prices = total[self._order]
        fits = np.ones(len(prices), dtype=bool)
        for name in np.unique(providers).tolist():
            of_it = providers == name
            steps = np.unique(prices[of_it]).tolist()
            if not allows(name, steps[-1]):
                allowed = bisect_left(steps, True, key=lambda price: not allows(name, price))
                fits &= ~of_it | (prices < steps[allowed])
        return self._order[fits]


def rank(offers: Sequence[Offer], view: JobView, known: Known | None = None) -> Ranking:
    """Price every offer and rank them; those that the job may not rent stand at the end. Pure."""
    known = known or Known()
    count = len(offers)
    facts = np.array([_FACTS(o) for o in offers], dtype=np.float64).reshape(count, 6)
    spot = np.fromiter((o.billing is Billing.SPOT_BID for o in offers), dtype=bool, count=count)
    ends_s = np.fromiter(
        (np.inf if o.max_duration_s is None else o.max_duration_s for o in offers), dtype=np.float64, count=count
    )
    disk = np.fromiter((np.inf if o.disk_gb is None else o.disk_gb for o in offers), dtype=np.float64, count=count)
    kinds: dict[tuple[str, str, int], int] = {}
    kind = np.fromiter(
        (kinds.setdefault((o.provider, o.gpu_name, o.num_gpus), len(kinds)) for o in offers), np.int64, count
    )
    guesses = [estimate(prior(gpu, gpus, view.load), gpu, view.measured) for _, gpu, gpus in kinds]
    of_kind = _by_kind(list(kinds), view, guesses)[kind]
    life = of_kind[:, 1]
    if view.lives is not None and view.lives.machines:
        for row, o in enumerate(offers):
            if (o.provider, o.machine_id) in view.lives.machines:
                life[row] = view.lives.of(o.provider, o.gpu_name, o.machine_id)
    on_demand = _column(known.on_demand, count, np.inf)
    floor, reliability = facts[:, 0], facts[:, 5]
    ceiling = np.minimum(on_demand, np.inf if view.cap is None else view.cap)
    # What can't be bid is shown at the price that it would take.
    wished = np.rint(floor * bids.MARGIN)
    rate = np.where(spot, np.where(floor > ceiling, wished, np.minimum(wished, ceiling)), floor)
    offered = pricing.Offered(
        rate,
        facts[:, 1],
        facts[:, 2],
        facts[:, 3],
        facts[:, 4],
        np.minimum(life, ends_s / 3600),
        of_kind[:, 2],
        of_kind[:, 4],
    )
    fleet = view.spec.fleet
    parts = pricing.effective_prices(offered, disk_gb=fleet.disk_gb, traffic=view.traffic, setup_s=view.setup_s)
    share = pricing.availabilities(reliability, offered.life_h, parts.start_s)
    mu = of_kind[:, 0] * share
    with np.errstate(divide="ignore"):
        rho = np.where(mu > 0, parts.total / 1e6 / mu, np.inf)
    usual = _column(known.usual, count, np.nan)
    lasting = parts.total + (usual - floor) * np.where(spot, bids.MARGIN, 1.0)
    reason = np.select(
        [
            of_kind[:, 3] > 0,
            reliability < fleet.min_reliability,
            floor > (np.inf if view.cap is None else view.cap),
            spot & (floor > on_demand),
            ends_s < np.maximum(MIN_LIFE_S, 2 * (2 * parts.start_s + LEAD_S)),
            disk < fleet.disk_gb,
            _column(dict.fromkeys(known.barred, 1.0), count, 0.0) > 0,
        ],
        [1, 2, 3, 4, 5, 6, 7],
        0,
    )
    table = _Table(offers, view, known, parts, guesses, kind, share, mu, rho, lasting, reason)
    return Ranking(table, np.lexsort((rho, reason > 0)))


def price_offer(offer: Offer, view: JobView, known: Known | None = None) -> Priced:
    """Effective price and throughput of one offer for a job, and whether the job's filters let it in. Pure."""
    return rank([offer], view, known)[0]


def lead_s(start_s: float) -> float:
    """So long before its host ends a machine, its successor is rented: twice the time that it should need."""
    return 2 * start_s + LEAD_S


def _by_kind(kinds: Sequence[tuple[str, str, int]], view: JobView, guesses: Sequence[Estimate]) -> NDArray[np.float64]:
    """μ, life, bytes to start, whether the job's `gpu_names` leave it out, and bytes of the image, for each kind of
    machine."""
    named = {name.replace("_", " ") for name in view.spec.fleet.gpu_names}
    rows = [
        (
            guess.mu, view.life_h(provider, gpu), view.start_bytes(provider),
            float(bool(named) and gpu.replace("_", " ") not in named), view.image_bytes.get(provider, 0.0),
        )
        for (provider, gpu, _), guess in zip(kinds, guesses, strict=True)
    ]  # fmt: skip
    return np.array(rows, dtype=np.float64).reshape(len(rows), 5)


def _each_of(pool: Candidate, machine: str, count: int) -> list[Candidate]:
    """So many machines of a pool. `machine`: how their leases name it."""
    return [
        replace(pool, key=f"{pool.key}#{n}", machine=f"{pool.machine}#{n}", pool=machine) for n in range(1, count + 1)
    ]


def _column(given: Mapping[int, float], count: int, default: float) -> pricing.Floats:
    out = np.full(count, default)
    if given:
        out[list(given)] = list(given.values())
    return out


def barred(ranking: Ranking, why: Callable[[Priced], str]) -> list[Priced]:
    """All of a ranking, with a further reason for some not to be rented; those at the end."""
    out = [p if p.excluded else replace(p, excluded=why(p)) for p in ranking]
    return sorted(out, key=lambda p: bool(p.excluded))
