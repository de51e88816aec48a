"""Where the target goes once the learner's waiting is measured: from Eq. 2 toward the true knee. Pure.

Eq. 2 supposes that nodes stand still during a broadcast; ours go on under the old version, so the learner is fed from
about R / T_train upward and Eq. 2 asks for κT_train / (κT_train − T_bcast) times as much
(`bench.steering` simulates both).
How much is needed in truth is measured: the bubble ratio says too little, a learner that never waits says enough.
A learner that waits although the pool makes what it consumes waits for a version: of the S + 1 steps that a version
may be trained on, κ go by before the next, and one T_train is left for broadcast, sampling and queueing at κ = S − 1.
Where a broadcast fits into a shorter period, and rollouts are nearly as old as they may be, that is tried first: it
costs traffic, not machines.

Invariant: the aim lies between γ·R/T_train and twice that; it or κ moves at most once a window of steps, and upward
only when the pool really delivered what was asked for and the learner waited all the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 2.0
"""Eq. 2 grows without bound as T_bcast nears κT_train. Nodes that generate on need no more than this many times the
consumption: a learner that waits all the same waits for younger versions, not for machines."""
WINDOW_STEPS = 6
"""Fewest steps between two moves; at least two publish periods as well, so that a window holds whole broadcasts."""
LONGEST_WINDOW = 60
"""Steps that are looked at, at most: what was long ago says little of now."""
FAR = 0.5
"""Down to this share of what the factor has above its least, as long as the learner has never waited for more."""
DOWN = 0.93
UP = 1.15
"""Once it has, down slowly, up at once: a waiting learner costs more than a surplus machine."""
DROPS = 0.03
"""More than this share of rollouts dropped as stale is a surplus, however seldom the learner waits."""
DELIVERS = 0.95
"""A pool that delivers less than this share of the aim says nothing about the aim."""
ROOM = 1.5
"""A period that is to be shorter holds a broadcast this many times, so that the links can breathe."""
TIGHT = 1.1
"""A period that holds its broadcast less often than this is too short."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A learner step as the control service has it on record: seconds, rollouts, the pool's rollouts per second."""

    step: int
    t_train: float
    t_idle: float
    trained: int
    dropped: int
    mu_pool: float
    oldest: int | None = None
    """The largest t − x that it was trained on; None: not known."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What the pool is held at."""

    factor: float | None
    """Target over γ·R/T_train: 1 is the consumption with its reserve, whatever T_train does. None: Eq. 2 still
    decides."""
    since_step: int
    """The last step that was looked at before the factor moved."""
    target: float
    """Rollouts per second."""
    knee: float
    """R / T_train."""
    why: str
    kappa: int = 1
    """The publish period from now on."""
    moved: bool = False
    """Whether this look moved the aim or κ."""
    near: bool = False
    """Whether the learner has waited for more at some factor: the knee is near, and what follows is in small steps."""


@dataclass(frozen=True, slots=True)
class Periods:
    """What the publish period may be. `least`: it has to be longer if it is less; `shortest`: it may go down to that;
    `longest`: κ = S − 1, or what the owner fixed."""

    least: int
    shortest: int
    longest: int


def periods(longest: int, *, fixed: bool, t_train: float, t_bcast: float | None) -> Periods:
    """Of a job whose owner fixed the period, or whose broadcasts nobody has measured yet: `longest` alone."""
    if fixed or t_bcast is None:
        return Periods(longest, longest, longest)
    shortest, least = (min(longest, max(1, math.ceil(room * t_bcast / t_train))) for room in (ROOM, TIGHT))
    return Periods(least, shortest, longest)


def batch_times(steps: Sequence[Seen], rollouts: int) -> list[float]:
    """Seconds that each step would have taken for R `rollouts` alone, newest first (`steps` ascending).

    A step takes further groups where some are to spare, in the place of those without a signal (docs/learner.md,
    `refill`). Nobody rents for them: held against R, its time would say that the learner needs less than it does, and
    it would wait as soon as nothing is to spare any more.
    """
    return [s.t_train * min(1.0, rollouts / s.trained) if s.trained else s.t_train for s in reversed(steps)]


def held_by(times: Sequence[float], steps: Sequence[Seen], *, usual: float, bound: float) -> float:
    """Seconds of a step by which the pool is held: `usual`, that of the newest ones, or the mean of all `times` without
    their tenth at either end, whichever is longer, as long as the learner has not waited for more than `bound`.

    Steps that come faster for a while need no machine if nobody waits: it would have to boot, and be given back.
    """
    if not times or measured(steps[-WINDOW_STEPS:])[0] > bound:
        return usual
    tenth = len(times) // 10
    return max(usual, statistics.fmean(sorted(times)[tenth : len(times) - tenth]))


def steer(
    before: tuple[float | None, int, bool],
    *,
    eq2: float,
    rollouts: int,
    gamma: float,
    t_train: float,
    kappa: int,
    staleness: int | None = None,
    allowed: Periods,
    steps: Sequence[Seen],
    bound: float,
) -> Aim:
    """The aim after a look at the newest steps. Until it first moves it is Eq. 2's target, but at most MOST times the
    consumption.

    `before` is (factor, since_step, near) of the last aim, (None, 0, False) at first; `eq2` the target that the
    capacity rule gives; `rollouts` R; `t_train` seconds for R (`held_by`); `kappa` κ now; `staleness` S; `steps`
    ascending; `bound` the share of the learner's time that it may wait; 0 switches steering off.
    """
    knee = rollouts / t_train
    floor = gamma * knee
    last = steps[-1].step if steps else 0
    if bound <= 0:
        return Aim(None, last, eq2, knee, "Eq. 2: steering is off", kappa)
    kept, since, near = before[0], min(before[1], last), before[2]
    factor = min(MOST, max(1.0, eq2 / floor if kept is None else kept))

    def stay(why: str) -> Aim:
        return Aim(kept, since, factor * floor, knee, why, kappa, near=near)

    def every(period: int, why: str) -> Aim:
        # The factor is kept from now on: of Eq. 2 a shorter period would ask for more machines.
        return Aim(factor, last, factor * floor, knee, f"{why}: κ {kappa} → {period}", period, moved=True, near=near)

    if kappa < allowed.least:
        return every(kappa + 1, f"a broadcast does not fit into {kappa} steps")
    # The first step waits for the first machines: that is start-up, not a bubble.
    window = [s for s in steps if s.step > max(1, since)][-LONGEST_WINDOW:]
    enough = max(WINDOW_STEPS, 2 * kappa)
    if len(window) < enough:
        return stay(f"{len(window)} of {enough} steps of the next look")
    bubble, dropped, pool = measured(window)
    told = f"waits {bubble:.1%}, drops {dropped:.1%} over {len(window)} steps"
    if bubble > bound:
        if pool >= DELIVERS * knee and kappa > allowed.shortest and _at_the_limit(window, staleness):
            return every(kappa - 1, f"{told}, though the pool delivered {pool:.4g}")
        if pool < DELIVERS * factor * floor:
            return stay(f"{told}; the pool delivered {pool:.4g}, less than the aim: no reason to ask for more")
        if factor >= MOST:
            return stay(f"{told}; more machines would not help: a greater staleness_budget or faster broadcasts would")
        new, what, near = min(MOST, max(factor, pool / floor) * UP), "more", True
    elif bubble <= bound / 2 or dropped > DROPS:
        # What the pool delivered was enough, if it was less than the aim.
        lower = factor * DOWN if near else min(factor * DOWN, 1 + (factor - 1) * FAR)
        new, what = max(1.0, min(lower, pool / floor)), "less"
    else:
        return stay(f"{told}: close to the bound of {bound:.0%}")
    if abs(new - factor) < 1e-9:
        return stay(f"{told}; as low as it may be")
    return Aim(new, last, new * floor, knee, f"{told}: {what}", kappa, moved=True, near=near)


def _at_the_limit(window: Sequence[Seen], staleness: int | None) -> bool:
    """Whether rollouts were nearly as old as they may be: only then a younger version is what the learner waits for.
    One that waits beside younger ones waits for machines or for audits, of which each further version needs more."""
    oldest = max((s.oldest for s in window if s.oldest is not None), default=None)
    return staleness is None or oldest is None or oldest >= staleness - 1


def measured(window: Sequence[Seen]) -> tuple[float, float, float]:
    """Bubble ratio, share of rollouts that were dropped, mean throughput of the pool over time."""
    seconds = [s.t_idle + s.t_train for s in window]
    total = sum(seconds)
    made = sum(s.trained + s.dropped for s in window)
    return (
        sum(s.t_idle for s in window) / total if total > 0 else 0.0,
        sum(s.dropped for s in window) / made if made else 0.0,
        sum(s.mu_pool * t for s, t in zip(window, seconds, strict=True)) / total if total > 0 else 0.0,
    )
