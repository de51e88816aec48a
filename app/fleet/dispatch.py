"""Which of the waiting groups a node gets. Pure.

Invariant: what is handed out is predicted to come back while it is admissible, or it is the group that waits longest
and no node at work could do better; a group is overtaken at most by those of a small window of the seeded order behind
it. A node chooses nothing: the order is the job's, its lengths and the nodes' speeds decide within the window.

Predicted-long groups go first and to fast nodes, as a group that begins late ends last (StreamRL, arXiv 2504.15930);
a slow node begins with the short ones. Groups that another node had begun go before all: their oldest tokens age.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

MARGIN = 0.8
"""Share of the time left that predicted work may take: predictions err."""
SHRINK = 8.0
"""So many completions of the job's mean length count beside a prompt's own."""
FORGET = 64.0
"""A prompt's mean length is that of about so many of its newest completions: policies change."""
LOOK_AHEAD_SHARE = 0.5
"""Groups that may be looked at beyond those asked for, as a share of a batch."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that waits. `tokens`: predicted completion tokens still to be sampled; None if nothing is known."""

    ordinal: int
    tokens: float | None
    partial_version: int | None = None
    """Oldest version of what another node had sampled of it."""
    fresh_tokens: float | None = None
    """`tokens` if what was sampled is thrown away."""

    def oldest(self, version: int) -> int:
        """Version of its oldest token if the rest is sampled under `version`."""
        return version if self.partial_version is None else min(version, self.partial_version)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of the node that asks, and of the others that are at work and measured."""

    own: float | None
    others: Sequence[float] = ()
    able: Sequence[float] | None = None
    """Those of the others that may have work now; None: all. One that is behind with its version does nothing."""

    @property
    def fast(self) -> bool:
        """Whether the node is at least as fast as the middle of those measured; one that nobody measured is not."""
        return self.own is not None and self.own >= statistics.median([self.own, *self.others])

    @property
    def best(self) -> float | None:
        """The fastest of all, the node included."""
        known = [s for s in (self.own, *self.others) if s]
        return max(known) if known else None


@dataclass(frozen=True, slots=True)
class Pace:
    """How versions age. `step_s` is the seconds between learner steps (`step_seconds`); None: not known."""

    step: int
    staleness: int
    step_s: float | None

    def time_left(self, version: int) -> float:
        """Seconds until rollouts whose oldest token is of `version` are over the staleness budget; ≤ 0: they are."""
        left = version + self.staleness + 1 - self.step
        if left <= 0:
            return -math.inf if self.step_s is None else left * self.step_s
        return math.inf if self.step_s is None else left * self.step_s


@dataclass(frozen=True, slots=True)
class Choice:
    """Ordinals handed out, in the order of the answer; of them those whose partial is thrown away; why there are
    none."""

    ordinals: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Ordinals of all candidates, given or not, whose partial can't be admissible any more."""
    reason: str = ""


def window(count: int, prompts: int) -> int:
    """How far behind the lowest waiting ordinal is looked when `count` are asked for: the bound on overtaking."""
    return max(count, math.floor(LOOK_AHEAD_SHARE * prompts), 1) if count > 0 else 0


def step_seconds(*, t_train: float | None, rollouts: int, mu_pool: float) -> float | None:
    """Seconds from step to step: what the learner needs, or the pool if that is slower."""
    if t_train is None:
        return None
    return max(t_train, rollouts / mu_pool) if mu_pool > 0 else t_train


def predicted_length(mean: float | None, tries: int, job_mean: float | None) -> float | None:
    """Tokens of a completion of one prompt: its own mean drawn to the job's; None if nothing is known."""
    if mean is None or tries <= 0:
        return job_mean
    if job_mean is None:
        return mean
    weight = min(float(tries), FORGET)
    return (weight * mean + SHRINK * job_mean) / (weight + SHRINK)


def mean_after(mean: float | None, tries: int, new: float, count: int, *, forget: float = FORGET) -> float:
    """A running mean after `count` further values of mean `new`; `tries` is how many it was of."""
    if mean is None or tries <= 0:
        return new
    old = min(float(tries), forget)
    return (old * mean + count * new) / (old + count)


def node_speed(*, tokens_per_s: float | None, rollouts_per_s: float | None, job_mean: float | None) -> float | None:
    """Tokens per second of a node, by its heartbeat; from its rollouts where it doesn't tell."""
    if tokens_per_s:
        return tokens_per_s
    return rollouts_per_s * job_mean if rollouts_per_s and job_mean else None


def _lost(candidate: Candidate, speeds: Speeds, pace: Pace) -> bool:
    """Whether no node could finish a begun group while what was sampled of it is admissible."""
    if candidate.partial_version is None:
        return False
    left = pace.time_left(candidate.partial_version)
    if left <= 0:
        return True
    best = speeds.best
    return best is not None and candidate.tokens is not None and candidate.tokens > best * left * MARGIN


def _order(candidates: Sequence[Candidate], *, fast: bool) -> list[Candidate]:
    """Begun groups first, those with the oldest tokens before others; then long or short ones first."""

    def key(c: Candidate) -> tuple[int, float, int]:
        if c.partial_version is not None:
            return 0, float(c.partial_version), c.ordinal
        tokens = c.tokens or 0.0
        return 1, -tokens if fast else tokens, c.ordinal

    return sorted(candidates, key=key)


def choose(
    candidates: Sequence[Candidate],
    *,
    count: int,
    version: int,
    speeds: Speeds,
    pace: Pace,
    held_tokens: float = 0.0,
    ahead: int = 1,
) -> Choice:
    """What a node that samples under `version` gets of the candidates, `count` at most.

    `candidates` are the waiting ordinals from the lowest one on, up to the `window`-th behind it; `held_tokens` is what
    the node has still to sample of other groups; `ahead` counts the groups that are out or accepted and not trained on.
    """
    dropped = [c.ordinal for c in candidates if _lost(c, speeds, pace)]
    waiting = [
        Candidate(c.ordinal, c.fresh_tokens if c.fresh_tokens is not None else c.tokens) if c.ordinal in dropped else c
        for c in candidates
    ]
    if count <= 0 or not waiting:
        return Choice(dropped=dropped)
    load = held_tokens
    given: list[int] = []
    for c in _order(waiting, fast=speeds.fast):
        if len(given) < count and _in_time(load + (c.tokens or 0.0), speeds.own, pace.time_left(c.oldest(version))):
            load += c.tokens or 0.0
            given.append(c.ordinal)
    if given:
        return Choice(given, dropped)
    head = min(waiting, key=lambda c: c.ordinal)
    if held_tokens == 0 and (ahead == 0 or not _others_can(head, version, speeds, pace)):
        return Choice([head.ordinal], dropped)
    return Choice([], dropped, _reason(head, version, speeds, pace, held_tokens))


def _in_time(tokens: float, speed: float | None, left: float) -> bool:
    return left > 0 and (speed is None or tokens <= speed * left * MARGIN)


def _others_can(head: Candidate, version: int, speeds: Speeds, pace: Pace) -> bool:
    """Whether some other node at work could do the head in time."""
    left = pace.time_left(head.oldest(version))
    able = speeds.others if speeds.able is None else speeds.able
    return any(_in_time(head.tokens or 0.0, speed, left) for speed in able)


def _reason(head: Candidate, version: int, speeds: Speeds, pace: Pace, held: float) -> str:
    return (
        f"dispatch: at {speeds.own or 0:.3g} tokens/s with {held:.0f} tokens to sample this node can't finish one more "
        f"group in the {max(0.0, pace.time_left(version)):.3g} s in which v{version} stays admissible"
    )
