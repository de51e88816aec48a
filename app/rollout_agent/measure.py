"""What a node measures of itself, and how large it makes its batches.

Invariant: rates are per second of generating time, so that waiting for work never makes a machine look slow.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

HALF_LIFE_BATCHES = 4.0
BUSY_WINDOW_S = 30.0
MIN_ITEMS, MAX_ITEMS = 1, 64
BATCH_LOW_S, BATCH_HIGH_S = 0.5, 1.0
WORTHWHILE_GAIN = 1.3
"""Doubling a long batch must raise the throughput by so much."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Smoothed speed: rollouts and completion tokens per second of generating time."""

    rollouts_per_s: float
    tokens_per_s: float


class Meter:
    """Exponentially weighted rates (half-life in batches) and the share of recent time spent generating."""

    def __init__(self) -> None:
        self._decay = 0.5 ** (1 / HALF_LIFE_BATCHES)
        self._rollouts = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._spans: deque[tuple[float, float]] = deque()
        self._running_since: float | None = None
        self._since: float | None = None
        self._warm = False

    def begin(self, now: float) -> None:
        """A batch starts to be generated at `now` (monotonic seconds)."""
        self._since = now if self._since is None else self._since
        self._running_since = now

    def end(self, began: float, now: float, *, rollouts: float = 0, tokens: int = 0) -> None:
        """It was generated from `began` to `now`; a failed one counts as busy time, but not into the rates.

        What another node had begun is a part of a rollout, as far as it was generated here."""
        self._running_since = None
        self._spans.append((began, now))
        while self._spans and self._spans[0][1] < now - BUSY_WINDOW_S:
            self._spans.popleft()
        if rollouts and not self._warm:
            # The first batch pays for what is set up once; counted, it would make the machine look slow.
            self._warm = True
        elif rollouts:
            self._rollouts = self._rollouts * self._decay + rollouts
            self._tokens = self._tokens * self._decay + tokens
            self._seconds = self._seconds * self._decay + (now - began)

    @property
    def rates(self) -> Rates | None:
        """None until a batch has taken measurable time."""
        if self._seconds <= 0:
            return None
        return Rates(self._rollouts / self._seconds, self._tokens / self._seconds)

    @property
    def usual_s(self) -> float | None:
        """Mean duration of the batches of the last half minute; None before the first one."""
        return sum(end - begin for begin, end in self._spans) / len(self._spans) if self._spans else None

    def busy_share(self, now: float) -> float | None:
        """Share of the last half minute (or of the time since the first batch) spent generating."""
        if self._since is None:
            return None
        start = max(self._since, now - BUSY_WINDOW_S)
        if now <= start:
            return None
        spans = list(self._spans)
        if self._running_since is not None:
            spans.append((self._running_since, now))
        busy = sum(max(0.0, min(end, now) - max(begin, start)) for begin, end in spans)
        return min(1.0, busy / (now - start))


def next_items(items: int, got: int, seconds: float, gain: float | None) -> int:
    """Groups to ask for next, after a batch of `got` groups (asked: `items`) took `seconds`. Powers of two.

    `gain` is the throughput at `items` over that at half as many; None: not known. Aims at batches of half a second to
    a second: long enough that requests cost little, short enough that a new version is soon in use. Where even small
    batches take longer (long completions), it grows as long as that clearly pays.
    """
    if got < items:
        return items if seconds <= BATCH_HIGH_S else 2 ** int(math.log2(max(1, got)))
    if seconds < BATCH_LOW_S:
        return min(MAX_ITEMS, items * 2)
    if seconds <= BATCH_HIGH_S:
        return items
    if gain is None or gain >= WORTHWHILE_GAIN:
        return min(MAX_ITEMS, items * 2)
    return max(MIN_ITEMS, items // 2)


class BatchSizer:
    """Finds the batch size of this machine. `items` is what to ask for."""

    def __init__(self) -> None:
        self.items = MIN_ITEMS
        self._speed: dict[int, float] = {}
        self._too_many = MAX_ITEMS + 1
        self._no_gain = MAX_ITEMS + 1

    def done(self, got: int, seconds: float) -> None:
        """A batch of `got` groups took `seconds`."""
        items, gain = self.items, None
        if got == items and seconds > 0:
            self._speed[items] = got / seconds
            half = self._speed.get(items // 2)
            gain = self._speed[items] / half if half else None
        following = next_items(items, got, seconds, gain)
        if following < items and got == items:
            self._no_gain = items
        elif seconds < BATCH_LOW_S:
            self._no_gain = MAX_ITEMS + 1
        grown_too_far = following >= self._too_many or following >= self._no_gain
        self.items = items if following > items and grown_too_far else following

    def out_of_memory(self) -> None:
        """The batch was too large for the machine: never so large again."""
        self._too_many = max(2, self.items)
        self.items = max(MIN_ITEMS, self.items // 2)
