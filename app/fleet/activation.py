"""Which machines to rent and which to give back. Pure.

Invariant: the pool is held at its target by the cheapest cover of what is missing, never with more than `slots`
machines; nobody is swapped unless the saving pays for the switch, and a price that swings makes nobody move twice
within `Policy.settle_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.fleet import bids
from app.fleet.candidates import Candidate
from app.fleet.cover import cheapest_cover, prefix

__all__ = ["Candidate", "Decision", "Policy", "Running", "cheapest_cover", "decide", "prefix"]

ROUNDING = 1e-9
"""Sums of throughputs are compared up to this share: the last bit of a float must not rent a machine."""
ALIKE = 0.95
"""A machine of at least this share of another's throughput can take its place: that much the same card on the same
link differs by its past alone, and a second machine for the last percent would make no swap pay."""


@dataclass(frozen=True, slots=True)
class Running:
    """A lease that we have."""

    candidate: Candidate
    ready: bool
    """Its node works; a booting one counts as capacity but is never released for being too much."""
    age_s: float
    endangered: bool = False
    """Its provider said that it may be taken away."""
    outbid: bool = False
    """It stays only for more money: at `candidate.price`, or a little less, but not below `least`."""
    least: int = 0
    """Its price at the bare floor of its bid, without a margin; 0 where nothing is asked for."""
    known: bool = True
    """`candidate.usual` rests on as long a look as it averages over; till then a swing can't be told from a rise."""
    ending: str = ""
    """Why it will be over soon, whatever is paid; empty if it will not."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Hysteresis. The defaults are ours: the paper gives none."""

    rent_below: float = 1.0
    """Rent only when the pool lies below this share of the target, and then up to the target."""
    surplus: float = 1.26
    """Release only from a pool that lies above this multiple of what would rent again, `rent_below` of the target."""
    keep: float = 1.12
    """A release leaves at least this multiple of the same, so that noise does not rent again what was just given back,
    and never less than the target. In a pool that has settled as a whole the target itself is enough."""
    calm_surplus: float = 1.2
    calm_keep: float = 1.08
    """The two in a pool that nobody has come into for `calm_lives`, whatever the target: machines come whole, and one
    that is kept for the last percent is dear. If it was needed after all, that costs one start-up in that time."""
    calm_lives: float = 15.0
    """Times `min_life_s`."""
    lasting: float = 0.0
    """The target in the fastest stretch of late, rollouts per second: a surplus beside what a slow one asks for is
    none."""
    min_life_s: float = 120.0
    """No lease is given back for price or surplus before that."""
    settle_lives: float = 60.0
    """Only after so many times `min_life_s` a lease is swapped for a moderate saving: prices that swing come back."""
    early_saving: float = 0.65
    """Share of the old price for which a younger lease is swapped as well: no swing of ±40 % offers as much."""
    switch_s: float = 90.0
    """Start-up time of a replacement, where its offer tells none: both are paid meanwhile."""
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
    """Keys of outbid or endangered leases that are worth their new price."""
    limits: dict[str, int] = field(default_factory=dict)
    """What those that are rented or bid for are worth at most, by key: the price of what would take their place."""


def decide(
    running: Sequence[Running], offers: Sequence[Candidate], target: float, slots: int, policy: Policy
) -> Decision:
    """Hold the pool at the target for the least money.

    `slots` is the most machines that the job may have at once, those running included. The price of an outbid or
    endangered lease is what keeping it would cost. The endangered competes with the market at that price; the outbid
    stays as long as that is less than what would replace it and the switch together (`bids.limit`). A machine is rented
    once, of a pool several; none of one that an endangered lease is from.
    """
    if len(running) > max(0, slots):
        return Decision(release=_excess(running, max(0, slots)))
    used = {r.candidate.machine for r in running}
    # Where one machine may be taken away, the next would be as well.
    shaken = {r.candidate.machine for r in running if r.endangered}
    market = [o for o in offers if o.machine not in used and o.pool not in shaken]
    free = slots - len(running)
    limits = {r.candidate.key: _worth(r, market, max(1, free), policy) for r in running if r.outbid and not r.ending}
    held = [_judged(r, limits) for r in running]
    raised = [key for key, limit in limits.items() if limit is None or _least(held, key) <= limit]
    worth = {key: limit for key in raised if (limit := limits[key]) is not None}
    made = _fill(held, market, target, slots, policy)
    moved = {key for key, _ in [*made.release, *made.retire]}
    kept = [key for key in [*made.rebid, *raised] if key not in moved]
    return replace(made, rebid=list(dict.fromkeys(kept)), limits={**made.limits, **worth})


def _fill(held: Sequence[Running], market: Sequence[Candidate], target: float, slots: int, policy: Policy) -> Decision:
    """Rent what is missing, give back what is too much, swap what is dear."""
    safe = [r for r in held if not r.endangered and not r.ending]
    leaving = {r.candidate.key: r for r in held if r.endangered or r.ending}
    planned, free = sum(r.candidate.mu for r in safe), slots - len(held)
    if planned < target * policy.rent_below * (1 - ROUNDING):
        pool = [*market, *(r.candidate for r in leaving.values() if not r.ending)]
        cover = cheapest_cover(pool, target - planned, slots - len(safe))
        if cover:
            made = _cover_decision(cover, leaving, free)
            return replace(made, limits=_rent_limits(made.rent, market, max(1, free)))
    elif spare := [(r.candidate.key, f"{r.ending}; the others are enough") for r in held if r.ending]:
        return Decision(release=spare)
    surplus = _surplus(safe, planned, target, policy)
    if surplus is not None:
        return Decision(release=[surplus])
    return _swap(safe, market, free, policy)


def _least(held: Sequence[Running], key: str) -> int:
    return next(r.least for r in held if r.candidate.key == key)


def _judged(r: Running, limits: Mapping[str, int | None]) -> Running:
    """An outbid lease at the price at which it stays; one that is not worth the floor is on its way out."""
    limit = limits.get(r.candidate.key)
    if limit is None:
        return r
    if r.least > limit:
        why = f"outbid: keeping it costs ${r.least / 1e6:.4f}/h, what takes its place is worth ${limit / 1e6:.4f}/h"
        return replace(r, ending=why)
    return replace(r, candidate=replace(r.candidate, price=min(r.candidate.price, limit)))


def _worth(r: Running, market: Sequence[Candidate], slots: int, policy: Policy) -> int | None:
    """The most that keeping a lease may cost before it is let go; None if nothing can take its place."""
    old, need = r.candidate, r.candidate.mu * ALIKE
    cover = cheapest_cover([replace(o, price=_lasting(o)) for o in market], need, slots)
    if sum(c.mu for c in cover) < need * (1 - ROUNDING):
        return None
    rival = sum(c.price for c in cover)
    switch = round((_at_best(old) + rival) * _switch_s(cover, policy) / 3600)
    if not r.known:
        # Nobody can tell a swing from a rise yet: only what no swing explains is left.
        return bids.limit(rival, switch, policy.life_h, policy.early_saving)
    return bids.limit(rival, switch, policy.life_h, policy.min_saving, old.usual)


def _rent_limits(rent: Sequence[Candidate], market: Sequence[Candidate], slots: int) -> dict[str, int]:
    """What each of those is worth at most: the price of what would be rented instead of it."""
    taken = {c.machine for c in rent}
    others = [o for o in market if o.machine not in taken]
    out = {}
    for c in rent:
        instead = cheapest_cover(others, c.mu * ALIKE, slots)
        if sum(o.mu for o in instead) >= c.mu * ALIKE * (1 - ROUNDING):
            out[c.key] = sum(o.price for o in instead)
    return out


def _switch_s(cover: Sequence[Candidate], policy: Policy) -> float:
    return max((c.start_s or policy.switch_s for c in cover), default=policy.switch_s)


def _excess(running: Sequence[Running], slots: int) -> list[tuple[str, str]]:
    """What has to go because the user allows fewer machines now: the endangered, then the dearest ρ."""
    worst = sorted(running, key=lambda r: (not (r.endangered or r.ending), -r.candidate.rho, r.candidate.key))
    why = f"{len(running)} machines, but only {slots} are allowed now"
    return [(r.candidate.key, why) for r in worst[: len(running) - slots]]


def _cover_decision(cover: Sequence[Candidate], endangered: Mapping[str, Running], free: int) -> Decision:
    """Rent what is new, keep what is worth it, let go of the endangered rest."""
    rent = [c for c in cover if c.key not in endangered]
    rebid = [c.key for c in cover if c.key in endangered]
    why = "about to be interrupted; cheaper machines take its place"
    leaving = [(key, r.ending or why) for key, r in endangered.items() if key not in rebid] if rent else []
    # Without room for both, the endangered make place first.
    now = max(0, len(rent) - free)
    return Decision(rent=rent, release=leaving[:now], retire=leaving[now:], rebid=rebid)


def _surplus(running: Sequence[Running], planned: float, target: float, policy: Policy) -> tuple[str, str] | None:
    """The dearest machine that the pool can do without: what works without it must be enough, not what still boots."""
    old = [r for r in running if r.ready and r.age_s >= policy.min_life_s]
    working = sum(r.candidate.mu for r in running if r.ready)
    target = max(target, policy.lasting)
    rents = policy.rent_below * target
    floor, most = max(target, policy.keep * rents), policy.surplus * rents
    youngest = min((r.age_s for r in running), default=0.0)
    if youngest >= policy.settle_s:
        floor = target
    if youngest >= policy.calm_lives * policy.min_life_s:
        floor, most = min(floor, policy.calm_keep * rents), policy.calm_surplus * rents
    for r in sorted(old, key=lambda r: -r.candidate.rho):
        if working - r.candidate.mu >= floor and planned > most:
            return r.candidate.key, f"pool {planned:.4g} > {most:.4g}, dearest ρ"
    return None


def _swap(running: Sequence[Running], market: Sequence[Candidate], free: int, policy: Policy) -> Decision:
    """One dear machine for cheaper ones that do as much, if that pays."""
    for r in sorted((r for r in running if r.ready and r.age_s >= policy.min_life_s), key=lambda r: -r.candidate.rho):
        share = policy.min_saving if r.known and r.age_s >= policy.settle_s else policy.early_saving
        cover = _replacement(r.candidate, market, max(1, free), share)
        if not cover:
            continue
        cost, price = sum(_lasting(c) for c in cover), _at_best(r.candidate)
        saving_h = price - cost
        switch = (price + cost) * _switch_s(cover, policy) / 3600
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
    need = old.mu * ALIKE
    if not cheap or need * min(_lasting(o) / min(o.mu, need) for o in cheap.values()) > limit:
        return []
    cover = cheapest_cover([replace(o, price=_lasting(o)) for o in cheap.values()], need, slots)
    covers = sum(c.mu for c in cover) >= need * (1 - ROUNDING)
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
