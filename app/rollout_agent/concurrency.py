"""How many samples an engine is given at a time.

Invariant: the target follows the engine's own figures and nothing else: it grows only while it is used and the engine
shows no sign of being full, and shrinks only when it does; it stays within its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.rollout_agent.engines.base import Load

START = 16
MAX_SAMPLES = 1024
CACHE_FULL = 0.95
"""Beyond this share of the key/value cache the next samples would push others out."""
CACHE_HALF = 0.5
"""Requests that were put back with less of the cache in use were put back by a swap, which empties it."""
BACKLOG = 0.125
"""A queue up to this share of what runs keeps the engine full while new work is on its way; more is waiting for
nothing."""
USED = 0.8
"""The target may grow only if so much of it is in flight, or all but two groups: else nothing was learnt about more."""
KNOWN = 0.9
"""And only if the engine's figures know of so much of what is in flight: one that is busy tells late."""
DECREASE = 0.8


@dataclass(frozen=True, slots=True)
class Bounds:
    """`step`: samples by which the target grows, those of a group."""

    lowest: int
    highest: int
    step: int


@dataclass(frozen=True, slots=True)
class Target:
    """Samples that should be in flight. `met`: the engine has been full once, so growth is by steps from now on;
    `preemptions`: as of the last look; `queued`: the last look found a backlog."""

    samples: int
    met: bool = False
    preemptions: int | None = None
    queued: bool = False


def first_target(bounds: Bounds) -> Target:
    """Where a new engine starts."""
    return Target(_within(max(START, bounds.step), bounds))


def next_target(target: Target, in_flight: int, load: Load, bounds: Bounds) -> Target:
    """After a look at the engine: doubled until it is full for the first time, then additive increase, multiplicative
    decrease. A decrease is given time to have its effect before the next one, and new work the time to leave the
    queue: a backlog counts when two looks find it."""
    seen = load.preemptions if target.preemptions is None else target.preemptions
    put_back = load.preemptions > seen and load.cache_used > CACHE_HALF
    pressed = put_back or load.cache_used > CACHE_FULL
    queued = load.waiting > max(bounds.step, BACKLOG * load.running)
    waited, target = target.queued, replace(target, preemptions=load.preemptions, queued=queued)
    if queued and not waited and not pressed:
        return target
    if pressed or queued:
        if in_flight > target.samples:
            return replace(target, met=True)
        most = min(target.samples, in_flight)
        fewer = int(most * DECREASE)
        if not pressed:
            # What runs is what it takes: below that and a short queue it would stand idle.
            fewer = min(most, max(fewer, load.running + int(max(bounds.step, BACKLOG * load.running))))
        return replace(target, samples=_within(fewer, bounds), met=True)
    used = in_flight > target.samples - max(2 * bounds.step, (1 - USED) * target.samples)
    if not used or load.running + load.waiting < KNOWN * in_flight:
        return target
    more = target.samples + bounds.step if target.met else target.samples * 2
    return replace(target, samples=_within(more, bounds))


def _within(samples: int, bounds: Bounds) -> int:
    return max(bounds.lowest, min(bounds.highest, samples))
