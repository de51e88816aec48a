"""How far S may go, by what the learner sees. `look` is pure.

A step that shows that the policies are too far apart lowers S at once, to one less than the oldest rollout it was made
from, so that the next step is made from younger ones. It rises by one only after GROW_EVERY steps without a sign of
that, and only while all signs are well inside their limits: what hurts is undone quickly, what helps is tried slowly.

Invariant: 1 ≤ S ≤ the user's bound; κ ≤ max(1, S − 1) and never above what the user fixed; after a bad step S is lower
than the oldest lag of that step, or 1; between two rises there are at least GROW_EVERY steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.protocol.job import JobSpec
from app.protocol.job import period as period_of
from app.protocol.learner import LearnerDirectives, StalenessMove

GROW_EVERY = 10
"""Calm steps before S rises by one."""
WINDOW = 10
"""Steps whose mean reward is held against that of as many before."""
NOISE = 3.0
"""A fall of the mean reward counts beyond so many of its standard errors."""
EASE = 0.5
"""S rises only while each sign is within this share of the way from harmless to its limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a bad sign: ESS below, mismatch KL above, cosine of consecutive gradients above."""

    min_ess: float = 0.5
    max_mismatch_kl: float = 0.02
    max_cosine: float = 0.9


@dataclass(frozen=True, slots=True)
class Signs:
    """What a step showed. `oldest` is the largest t − x that it was trained on; `cosine` None if it isn't measured."""

    ess: float
    mismatch_kl: float
    reward: float
    oldest: int
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """`staleness` is the effective S, `calm` the steps since it changed or a sign was bad; rewards since it changed."""

    staleness: int
    calm: int = 0
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A new S and κ, and why."""

    staleness: int
    publish_period: int
    reason: str


def signs(metrics: Mapping[str, float], lags: Mapping[int, int]) -> Signs:
    """From a step's report."""
    return Signs(
        ess=metrics["ess"],
        mismatch_kl=metrics["mismatch_kl"],
        reward=metrics["reward"],
        oldest=max(lags, default=0),
        cosine=metrics.get("grad_cosine"),
    )


def look(
    state: State, seen: Signs, *, bound: int, period: int | None = None, limits: Limits | None = None
) -> tuple[State, Move | None]:
    """The state after a step, and the move that it calls for. `bound` is the user's S, `period` a κ that they fixed."""
    limits = limits or Limits()
    rewards = (*state.rewards, seen.reward)[-2 * WINDOW :]
    bad = trouble(seen, rewards, limits)
    if state.staleness > bound:
        return _moved(bound, period, f"the job's bound is {bound} now")
    if bad:
        lower = max(1, min(state.staleness, seen.oldest) - 1)
        if lower == state.staleness:
            return replace(state, calm=0, rewards=rewards), None
        return _moved(lower, period, bad)
    calm = state.calm + 1
    if state.staleness < bound and calm >= GROW_EVERY and easy(seen, limits):
        return _moved(state.staleness + 1, period, f"{calm} calm steps")
    return replace(state, calm=calm, rewards=rewards), None


def trouble(seen: Signs, rewards: tuple[float, ...], limits: Limits) -> str:
    """The bad sign, in words; empty if there is none. A number that isn't one is a bad sign."""
    if not seen.ess >= limits.min_ess:
        return f"ESS {seen.ess:.3f} is below {limits.min_ess:g}"
    if not seen.mismatch_kl <= limits.max_mismatch_kl:
        return f"mismatch KL {seen.mismatch_kl:.3g} is above {limits.max_mismatch_kl:g}"
    if seen.cosine is not None and not seen.cosine <= limits.max_cosine:
        return f"consecutive gradients have cosine {seen.cosine:.2f}, above {limits.max_cosine:g}"
    if len(rewards) == 2 * WINDOW and (fall := _fall(rewards)):
        return fall
    return ""


def easy(seen: Signs, limits: Limits) -> bool:
    """Whether all signs are far enough from their limits to try a greater S."""
    return (
        1 - seen.ess <= EASE * (1 - limits.min_ess)
        and seen.mismatch_kl <= EASE * limits.max_mismatch_kl
        and (seen.cosine is None or seen.cosine <= EASE * limits.max_cosine)
    )


def again(spec: JobSpec, state: State | None) -> StalenessMove | None:
    """What a learner asks for that goes on from a checkpoint with this state; None if S is fixed."""
    if state is None:
        return None
    period = period_of(state.staleness, spec.publish_period)
    reason = "the learner goes on from a checkpoint, and that was its S"
    return StalenessMove(staleness_budget=state.staleness, publish_period=period, reason=reason)


class Adaptive:
    """The controller of one job's learner: a state, and what it makes of each step. Does nothing for jobs whose S is
    fixed. Without a state to go on from it begins with the S that holds then."""

    def __init__(self, spec: JobSpec, state: State | None = None) -> None:
        self._spec = spec
        self._state = state

    def state(self, directives: LearnerDirectives) -> State | None:
        """What a later process goes on from; None if S is fixed."""
        if not self._spec.adaptive:
            return None
        return self._state or State(directives.staleness_budget)

    def after(
        self, metrics: Mapping[str, float], lags: Mapping[int, int], directives: LearnerDirectives
    ) -> StalenessMove | None:
        """What the job should have from now on; None if nothing changes. What was asked for before counts as given,
        although the control service's answer may still be under way."""
        wanted, state = self._spec.staleness, self.state(directives)
        if wanted is None or state is None:
            return None
        self._state, move = look(
            state,
            signs(metrics, lags),
            bound=directives.staleness_bound or wanted.max,
            period=self._spec.publish_period,
            limits=Limits(wanted.min_ess, wanted.max_mismatch_kl),
        )
        if move is None:
            return None
        return StalenessMove(
            staleness_budget=move.staleness, publish_period=move.publish_period, reason=move.reason[:300]
        )


def _moved(staleness: int, period: int | None, reason: str) -> tuple[State, Move]:
    return State(staleness), Move(staleness, period_of(staleness, period), reason)


def _fall(rewards: tuple[float, ...]) -> str:
    before, now = rewards[:WINDOW], rewards[WINDOW:]
    fall = statistics.fmean(before) - statistics.fmean(now)
    error = math.sqrt((statistics.variance(before) + statistics.variance(now)) / WINDOW)
    if not fall > max(NOISE * error, 1e-9):
        return ""
    return f"reward fell from {statistics.fmean(before):.3f} to {statistics.fmean(now):.3f} in {WINDOW} steps"
