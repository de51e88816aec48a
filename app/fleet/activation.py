"""Which machines to rent and which to give back. Pure.

Invariant: the chosen cover never costs more than the paper's prefix rule (cheapest ρ first until Σμ ≥ target), holds
at most `slots` machines, and one per machine id; nobody is swapped unless the saving pays for the switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By ρ, one per machine, without those that do nothing."""
    seen: set[str] = set()
    out = []
    for c in sorted(candidates, key=lambda c: (c.rho, c.price, c.key)):
        if c.mu > 0 and c.machine not in seen:
            seen.add(c.machine)
            out.append(c)
    return out


def prefix(candidates: Sequence[Candidate], need: float, slots: int) -> list[Candidate]:
    """The paper's rule: the cheapest ρ first until Σμ ≥ need."""
    chosen: list[Candidate] = []
    total = 0.0
    for c in _ranked(candidates):
        if total >= need or len(chosen) == slots:
            break
        chosen.append(c)
        total += c.mu
    return chosen


def cheapest_cover(candidates: Sequence[Candidate], need: float, slots: int) -> list[Candidate]:
    """A cheap set with Σμ ≥ need in at most `slots` machines; the fastest reachable set if none covers it.

    Tries each prefix of the ρ order closed by the cheapest single machine that covers the rest, and takes away what
    the set does not need. The plain prefix is among the tries, so it is never dearer than that.
    """
    if need <= 0 or slots <= 0:
        return []
    ranked = _ranked(candidates)
    best: list[Candidate] | None = None
    total, kept = 0.0, 0
    for kept in range(min(slots, len(ranked) + 1)):
        rest = ranked[kept:]
        closing = min((c for c in rest if total + c.mu >= need), key=lambda c: (c.price, c.key), default=None)
        if closing is not None:
            trial = _trim([*ranked[:kept], closing], need)
            if best is None or _cost(trial) < _cost(best):
                best = trial
        if kept == len(ranked) or total >= need:
            break
        total += ranked[kept].mu
    if best is not None:
        return best
    return sorted(ranked, key=lambda c: -c.mu)[:slots]


def _trim(chosen: list[Candidate], need: float) -> list[Candidate]:
    """Without machines that the cover does not need, dearest first."""
    total = sum(c.mu for c in chosen)
    for c in sorted(chosen, key=lambda c: -c.price):
        if total - c.mu >= need:
            chosen = [k for k in chosen if k is not c]
            total -= c.mu
    return chosen


def _cost(chosen: Sequence[Candidate]) -> int:
    return sum(c.price for c in chosen)


@dataclass(frozen=True, slots=True)
class Running:
    """A lease that we have."""

    candidate: Candidate
    ready: bool
    """Its node works; a booting one counts as capacity but is never released for being too much."""
    age_s: float
    endangered: bool = False
    """It will be taken away: outbid at the price in force."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Hysteresis. Defaults from FACTS §2.4 (inferred: the paper gives none)."""

    surplus: float = 1.25
    """Release only what lies above this multiple of the target."""
    min_life_s: float = 120.0
    """No lease is given back for price or surplus before that."""
    switch_s: float = 90.0
    """Start-up time of a replacement: both are paid meanwhile."""
    life_h: float = 1.0
    """How long a saving is expected to last."""
    min_saving: float = 0.15
    """Share of the old price that a swap must save."""


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
    safe = [r for r in running if not r.endangered]
    endangered = {r.candidate.key: r for r in running if r.endangered}
    planned = sum(r.candidate.mu for r in safe)
    used = {r.candidate.machine for r in running}
    market = [o for o in offers if o.machine not in used]
    if planned < target:
        pool = [*market, *(r.candidate for r in endangered.values())]
        cover = cheapest_cover(pool, target - planned, slots - len(safe))
        return _cover_decision(cover, endangered, slots - len(running))
    surplus = _surplus(safe, planned, target, policy)
    if surplus is not None:
        return Decision(release=[surplus])
    return _swap(safe, market, slots - len(running), policy)


def _cover_decision(cover: Sequence[Candidate], endangered: Mapping[str, Running], free: int) -> Decision:
    """Rent what is new, raise the bid of what stays, let go of the endangered rest."""
    rent = [c for c in cover if c.key not in endangered]
    rebid = [c.key for c in cover if c.key in endangered]
    why = "outbid at the price in force; cheaper machines take its place"
    leaving = [(key, why) for key in endangered if key not in rebid] if rent else []
    # Without room for both, the endangered make place first.
    now = max(0, len(rent) - free)
    return Decision(rent=rent, release=leaving[:now], retire=leaving[now:], rebid=rebid)


def _surplus(running: Sequence[Running], planned: float, target: float, policy: Policy) -> tuple[str, str] | None:
    """The dearest machine that the pool can do without."""
    old = [r for r in running if r.ready and r.age_s >= policy.min_life_s]
    for r in sorted(old, key=lambda r: -r.candidate.rho):
        left = planned - r.candidate.mu
        if left >= target and planned > policy.surplus * target:
            return r.candidate.key, f"pool {planned:.4g} > target {target:.4g}, dearest ρ"
    return None


def _swap(running: Sequence[Running], market: Sequence[Candidate], free: int, policy: Policy) -> Decision:
    """One dear machine for cheaper ones of at least its throughput, if that pays."""
    for r in sorted((r for r in running if r.ready and r.age_s >= policy.min_life_s), key=lambda r: -r.candidate.rho):
        cover = cheapest_cover(market, r.candidate.mu, max(1, free))
        if not cover or sum(c.mu for c in cover) < r.candidate.mu:
            continue
        saving_h = r.candidate.price - _cost(cover)
        switch = (r.candidate.price + _cost(cover)) * policy.switch_s / 3600
        if saving_h < policy.min_saving * r.candidate.price or saving_h * policy.life_h <= switch:
            continue
        why = f"swapped for {len(cover)} cheaper: saves ${saving_h / 1e6:.4f}/h, the switch costs ${switch / 1e6:.4f}"
        # At the user's cap there is no room for both: the old one goes first, the market is asked at the next tick.
        if len(cover) > free:
            return Decision(release=[(r.candidate.key, why)])
        return Decision(rent=cover, retire=[(r.candidate.key, why)])
    return Decision()
