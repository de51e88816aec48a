"""Minimum intervals between calls, per endpoint.

Invariant: two calls of one kind start at least their interval apart; a 429 pushes the next one further out, and nobody
sleeps through a long one: the call is refused here instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

INTERVALS_S = {
    "search": 6.0, "create": 4.5, "destroy": 3.0, "show": 2.0, "list": 1.0, "bid": 5.5, "logs": 1.0, "user": 1.0,
    "charges": 1.0,
}  # fmt: skip
"""vast.ai's published thresholds in seconds; calls without one get a second."""
LONG_WAIT_S = 30.0
"""A daily quota may ask for hours: what must wait longer than this is not sent at all."""


class Intervals:
    """Waits its callers into line. `scale` 0 switches waiting off, except after a 429."""

    def __init__(
        self,
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scale = scale
        self._clock = clock
        self._sleep = sleep
        self._next: dict[str, float] = {}
        self._held: dict[str, float] = {}

    def held_s(self, call: str) -> float:
        """Seconds for which a 429 keeps `call` away, if that is too long to wait for; else 0."""
        left = self._held.get(call, 0.0) - self._clock()
        return left if left > LONG_WAIT_S else 0.0

    async def wait(self, call: str) -> None:
        """Return when `call` may start; the turn is taken at once, so callers queue."""
        now = self._clock()
        start = max(now, self._next.get(call, now))
        self._next[call] = start + INTERVALS_S.get(call, 1.0) * self._scale
        if start > now:
            await self._sleep(start - now)

    def penalise(self, call: str, wait_s: float) -> None:
        """The provider said: not before `wait_s` seconds from now."""
        until = self._clock() + wait_s
        if wait_s > LONG_WAIT_S:
            self._held[call] = max(self._held.get(call, 0.0), until)
        else:
            self._next[call] = max(self._next.get(call, 0.0), until)
