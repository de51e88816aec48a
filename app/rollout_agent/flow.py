"""How full an engine is kept when samples come one by one, and what a node measures of itself then.

Invariant: the speed told is that of a well filled engine, so that waiting for work never makes a machine look slow; one
that was never well filled is judged by how far it was.
"""

from __future__ import annotations

from collections import deque

from app.rollout_agent.concurrency import MAX_SAMPLES, Bounds, first_target, next_target
from app.rollout_agent.engines.base import Load
from app.rollout_agent.measure import BUSY_WINDOW_S, Rates

MAX_READY = 256
"""With so many groups waiting to be scored or handed in, nothing more is leased."""
MAX_LEASE = 1024
OTHER_FILES = 256
"""Files that an agent has open besides a connection for each sample."""
EAGER = 8
"""Work is asked for when this part of the target is free: fewer requests, and the backlog fills the gap."""
HALF_LIFE_S = 30.0
FILLED = 0.5
"""At this share of the target an engine counts as well filled."""
LEAST_S = 1.0
"""Less time than that says nothing."""


def most_samples(open_files: int) -> int:
    """Samples in flight of a process that may have so many files open: each has a connection to the engine."""
    return max(1, min(MAX_SAMPLES, open_files - OTHER_FILES))


class Filling:
    """How many samples should be in flight, in groups of `group_size`; at most `most`, or one group."""

    def __init__(self, group_size: int, most: int = MAX_SAMPLES) -> None:
        self._group_size = group_size
        self._bounds = Bounds(group_size, max(most, group_size), group_size)
        self._target = first_target(self._bounds)

    @property
    def samples(self) -> int:
        """That many."""
        return self._target.samples

    def follow(self, load: Load, in_flight: int) -> None:
        """The engine has these figures with so many samples in flight; without any they are of others' requests."""
        if in_flight:
            self._target = next_target(self._target, in_flight, load, self._bounds)

    def room(self, in_flight: int, ready: int) -> int:
        """Groups to ask for; 0: it is not worth a request yet. `ready`: groups that wait to be scored or handed in."""
        groups = (self.samples - in_flight) // self._group_size
        worth = max(1, self.samples // EAGER // self._group_size)
        return 0 if groups < worth or ready >= MAX_READY else min(groups, MAX_LEASE)


class _Sums:
    """Rollouts, tokens and seconds; what is older counts less, by half in so many seconds."""

    def __init__(self) -> None:
        self.rollouts = self.tokens = self.seconds = 0.0

    def pass_time(self, seconds: float) -> None:
        decay = 0.5 ** (seconds / HALF_LIFE_S)
        self.rollouts, self.tokens = self.rollouts * decay, self.tokens * decay
        self.seconds = self.seconds * decay + seconds

    def add(self, tokens: int, share: float) -> None:
        self.rollouts += share
        self.tokens += tokens


class FlowMeter:
    """Told of every change: `level` before and after, `finished` for each sample. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._filled = _Sums()
        self._any = _Sums()
        self._in_flight = 0
        self._share = 0.0
        self._at: float | None = None
        self._since: float | None = None
        self._busy: deque[tuple[float, float]] = deque()
        self._interval_s: float | None = None
        self._last_result: float | None = None

    def level(self, now: float, in_flight: int, target: int) -> None:
        """From `now` on so many samples are in flight, and `target` should be."""
        self._pass(now)
        if in_flight and not self._in_flight:
            self._last_result = now
        self._in_flight, self._share = in_flight, min(1.0, in_flight / max(1, target))

    def finished(self, now: float, tokens: int, share: float = 1.0) -> None:
        """A sample has come to its end, with so many tokens of this node, which are such a share of a rollout."""
        self._pass(now)
        self._any.add(tokens, share)
        if self._share >= FILLED:
            self._filled.add(tokens, share)
        if self._last_result is not None:
            interval = now - self._last_result
            self._interval_s = interval if self._interval_s is None else 0.9 * self._interval_s + 0.1 * interval
        self._last_result = now

    @property
    def rates(self) -> Rates | None:
        """None until samples have taken measurable time."""
        sums = self._filled if self._filled.seconds >= LEAST_S else self._any
        if sums.seconds < LEAST_S or not sums.rollouts:
            return None
        return Rates(sums.rollouts / sums.seconds, sums.tokens / sums.seconds)

    @property
    def usual_s(self) -> float | None:
        """Smoothed seconds from one result to the next; None before the first."""
        return self._interval_s

    def busy_share(self, now: float) -> float | None:
        """Share of the last half minute (or of the time since the first sample) in which anything was sampled."""
        if self._since is None:
            return None
        self._pass(now)
        start = max(self._since, now - BUSY_WINDOW_S)
        if now <= start:
            return None
        return min(1.0, sum(max(0.0, end - max(begin, start)) for begin, end in self._busy) / (now - start))

    def _pass(self, now: float) -> None:
        if self._at is None:
            self._at = self._since = now
        seconds, began = max(0.0, now - self._at), self._at
        self._at = now
        if not self._in_flight or not seconds:
            return
        self._any.pass_time(seconds * self._share)
        if self._share >= FILLED:
            self._filled.pass_time(seconds * self._share)
        if self._busy and self._busy[-1][1] == began:
            self._busy[-1] = (self._busy[-1][0], now)
        else:
            self._busy.append((began, now))
        while self._busy and self._busy[0][1] < now - BUSY_WINDOW_S:
            self._busy.popleft()
