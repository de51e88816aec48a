"""How a node gets to a version: whole, or over deltas from what it holds. Pure.

Invariant: every step of a plan starts from what the node holds or from what the step before gave it; a plan never
brings more bytes than the whole version would where that is to be had. Nobody is sent to a base that he hasn't got.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that can be fetched: a version whole (`base` None), or what leads to it from `base`. `bytes` of it."""

    version: int
    base: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps in order; the last gives the version wanted."""

    steps: tuple[Offer, ...]

    @property
    def bytes(self) -> int:
        """What all steps bring."""
        return sum(step.bytes for step in self.steps)


def cheapest(version: int, *, held: Collection[int], wholes: Mapping[int, int], deltas: Iterable[Offer]) -> Plan | None:
    """The way to `version` with the fewest bytes; None when there is none.

    `held`: versions whose payload the node has. `wholes`: version → bytes of what can be fetched whole. A whole older
    version with deltas after it counts too. Of ways with the same bytes the one with fewer steps.
    """
    by_version = {offer.version: offer for offer in deltas if offer.base is not None and offer.base < offer.version}
    best: Plan | None = None
    chain: tuple[Offer, ...] = ()
    at = version
    while True:
        start = () if at in held else (Offer(at, None, wholes[at]),) if at in wholes else None
        if start is not None:
            found = Plan((*start, *chain))
            if best is None or (found.bytes, len(found.steps)) < (best.bytes, len(best.steps)):
                best = found
        step = by_version.get(at)
        if at in held or step is None or step.base is None:
            return best
        chain, at = (step, *chain), step.base


def newest(after: int, *, held: Collection[int], wholes: Mapping[int, int], deltas: Collection[Offer]) -> Plan | None:
    """The cheapest way to the newest version > `after` that can be reached at all without going back."""
    wholes = {version: size for version, size in wholes.items() if version > after}
    versions = {*wholes, *(offer.version for offer in deltas)}
    for version in sorted((v for v in versions if v > after), reverse=True):
        plan = cheapest(version, held=held, wholes=wholes, deltas=deltas)
        if plan is not None and plan.steps and plan.steps[0].version > after:
            return plan
    return None


def useful(version: int, whole_bytes: int, deltas: Iterable[Offer], at_most: int) -> set[int]:
    """Versions of the deltas worth keeping: those of the chain that ends at `version`, newest first, as long as the
    chain is shorter than the whole version, and no more than `at_most`."""
    by_version = {offer.version: offer for offer in deltas}
    kept: set[int] = set()
    total, at = 0, version
    while len(kept) < at_most:
        step = by_version.get(at)
        if step is None or step.base is None or step.base >= at or total + step.bytes >= whole_bytes:
            break
        kept.add(at)
        total, at = total + step.bytes, step.base
    return kept


def keyframe(base: int | None, *, stored: int | None, since: int, every: int) -> bool:
    """Whether a version goes into the object store whole, and not as its delta.

    It does when it has no delta (`base` None), when the delta's base isn't the version that was `stored` last, and when
    `since`, the number of deltas stored after the last whole version, has come to `every` − 1.
    """
    return base is None or base != stored or since + 1 >= every
