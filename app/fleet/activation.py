"""Which machines to rent and which to give back. Pure.

Invariant: the pool is held at its target by the cheapest cover of what is missing, never with more than `slots`
machines; nobody is swapped unless the saving pays for the switch, and a price that swings makes nobody move twice
within `Policy.settle_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.fleet.cover import Candidate, cheapest_cover, prefix

__all__ = ["Candidate", "Decision", "Policy", "Running", "cheapest_cover", "decide", "prefix"]

ROUNDING = 1e-9
"""Sums of throughputs are compared up to this share: the last bit of a float must not rent a machine."""


@dataclass(frozen=True, slots=True)
class Running:
    """A lease that we have."""

    candidate: Candidate
    ready: bool
    """Its node works; a booting one counts as capacity but is never released for being too much."""
    age_s: float
    endangered: bool = False
    """It will be taken away: outbid at the price in force, or its provider said so."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Hysteresis. Defaults from FACTS §2.4 (inferred: the paper gives none)."""

    rent_below: float = 1.0
    """Rent only when the pool lies below this share of the target, and then up to the target."""
    surplus: float = 1.25
    """Release only from a pool that lies above this multiple of the target."""
    keep: float = 1.1
    """A release leaves at least this multiple of the target, so that noise does not rent again what was just given
    back. In a pool that has settled as a whole the target itself is enough."""
    min_life_s: float = 120.0
    """No lease is given back for price or surplus before that."""
    settle_lives: float = 60.0
    """Only after so many times `min_life_s` a lease is swapped for a moderate saving: prices that swing come back."""
    early_saving: float = 0.65
    """Share of the old price for which a younger lease is swapped as well: no swing of ±40 % offers as much."""
    switch_s: float = 90.0
    """Start-up time of a replacement: both are paid meanwhile."""
    life_h: float = 1.0
    """How long a saving is expected to last."""
    min_saving: float = 0.15
    """Share of the old price that a swap must save."""

    @property
    def settle_s(self) -> float:
        """Age from which a moderate saving is worth a swap."""
        return self.settle_lives * self.min_life_s


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, with reasons that a person can read."""

    rent: list[Candidate] = field(default_factory=list)
    release: list[tuple[str, str]] = field(default_factory=list)
    """Key of a lease to give back now, reason."""
    retire: list[tuple[str, str]] = field(default_factory=list)
    """Key of a lease to give back once what is rented here works, reason."""
    rebid: list[str] = field(default_factory=list)
    """Keys of endangered leases that are worth their new price."""


def decide(
    running: Sequence[Running], offers: Sequence[Candidate], target: float, slots: int, policy: Policy
) -> Decision:
    """Hold the pool at the target for the least money.

    `slots` is the most machines that the job may have at once, those running included. The price of an endangered
    lease is what keeping it would cost; it competes with the market at that price.
    """
    if len(running) > max(0, slots):
        return Decision(release=_excess(running, max(0, slots)))
    safe = [r for r in running if not r.endangered]
    endangered = {r.candidate.key: r for r in running if r.endangered}
    planned = sum(r.candidate.mu for r in safe)
    used = {r.candidate.machine for r in running}
    market = [o for o in offers if o.machine not in used]
    free = slots - len(running)
    if planned < target * policy.rent_below * (1 - ROUNDING):
        pool = [*market, *(r.candidate for r in endangered.values())]
        cover = cheapest_cover(pool, target - planned, slots - len(safe))
        if cover:
            return _cover_decision(cover, endangered, free)
    surplus = _surplus(safe, planned, target, policy)
    if surplus is not None:
        return Decision(release=[surplus])
    return _swap(safe, market, free, policy)


def _excess(running: Sequence[Running], slots: int) -> list[tuple[str, str]]:
    """What has to go because the user allows fewer machines now: the endangered, then the dearest ρ."""
    worst = sorted(running, key=lambda r: (not r.endangered, -r.candidate.rho, r.candidate.key))
    why = f"{len(running)} machines, but only {slots} are allowed now"
    return [(r.candidate.key, why) for r in worst[: len(running) - slots]]


def _cover_decision(cover: Sequence[Candidate], endangered: Mapping[str, Running], free: int) -> Decision:
    """Rent what is new, raise the bid of what stays, let go of the endangered rest."""
    rent = [c for c in cover if c.key not in endangered]
    rebid = [c.key for c in cover if c.key in endangered]
    why = "outbid, or about to be interrupted; cheaper machines take its place"
    leaving = [(key, why) for key in endangered if key not in rebid] if rent else []
    # Without room for both, the endangered make place first.
    now = max(0, len(rent) - free)
    return Decision(rent=rent, release=leaving[:now], retire=leaving[now:], rebid=rebid)


def _surplus(running: Sequence[Running], planned: float, target: float, policy: Policy) -> tuple[str, str] | None:
    """The dearest machine that the pool can do without."""
    old = [r for r in running if r.ready and r.age_s >= policy.min_life_s]
    settled = all(r.age_s >= policy.settle_s for r in running)
    floor = target if settled else policy.keep * target
    for r in sorted(old, key=lambda r: -r.candidate.rho):
        left = planned - r.candidate.mu
        if left >= floor and planned > policy.surplus * target:
            return r.candidate.key, f"pool {planned:.4g} > target {target:.4g}, dearest ρ"
    return None


def _swap(running: Sequence[Running], market: Sequence[Candidate], free: int, policy: Policy) -> Decision:
    """One dear machine for cheaper ones of at least its throughput, if that pays."""
    for r in sorted((r for r in running if r.ready and r.age_s >= policy.min_life_s), key=lambda r: -r.candidate.rho):
        share = policy.min_saving if r.age_s >= policy.settle_s else policy.early_saving
        cover = _replacement(r.candidate, market, max(1, free), share)
        if not cover:
            continue
        cost, price = sum(_lasting(c) for c in cover), _at_best(r.candidate)
        saving_h = price - cost
        switch = (price + cost) * policy.switch_s / 3600
        if saving_h * policy.life_h <= switch:
            continue
        why = f"swapped for {len(cover)} cheaper: saves ${saving_h / 1e6:.4f}/h, the switch costs ${switch / 1e6:.4f}"
        # At the user's cap there is no room for both: the old one goes first, the market is asked at the next tick.
        if len(cover) > free:
            return Decision(release=[(r.candidate.key, why)])
        return Decision(rent=cover, retire=[(r.candidate.key, why)])
    return Decision()


def _lasting(offer: Candidate) -> int:
    """What an offer will cost while it is held: a price below its usual one comes back."""
    return offer.price if offer.usual is None else max(offer.price, offer.usual)


def _at_best(old: Candidate) -> int:
    """What a lease costs, if a price above its usual one comes back."""
    return old.price if old.usual is None else min(old.price, old.usual)


def _replacement(old: Candidate, market: Sequence[Candidate], slots: int, share: float) -> list[Candidate]:
    """The cheapest machines that do as much as the old one and save that share of its price; none if there are none.

    A saving counts only if it is there now and was there for a while.
    """
    limit = _at_best(old) * (1 - share)
    cheap = {o.key: o for o in market if _lasting(o) <= limit and o.mu > 0}
    # No cover costs less than the best unit cost times the throughput: most machines need no search.
    if not cheap or old.mu * min(_lasting(o) / min(o.mu, old.mu) for o in cheap.values()) > limit:
        return []
    cover = cheapest_cover([replace(o, price=_lasting(o)) for o in cheap.values()], old.mu, slots)
    covers = sum(c.mu for c in cover) >= old.mu * (1 - ROUNDING)
    return [cheap[c.key] for c in cover] if covers and sum(c.price for c in cover) <= limit else []


class Patience:
    """Lets a decision through once it has been the same kind for `wait_s` seconds; an urgent one at once.

    What the pool delivers flickers. A shortage or a surplus that is gone a moment later was none.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}

    def allows(self, job: str, decision: Decision, now: float, wait_s: float, *, urgent: bool) -> bool:
        """Whether to act on `decision` of a job now."""
        kind = kind_of(decision)
        before, since = self._since.get(job, ("", now))
        if kind != before:
            since = now
        self._since[job] = (kind, since)
        return urgent or now - since >= wait_s


def kind_of(decision: Decision) -> str:
    """`none`, `rent`, `swap` or `release`."""
    if decision.retire or (decision.rent and decision.release):
        return "swap"
    if decision.rent or decision.rebid:
        return "rent"
    return "release" if decision.release else "none"
