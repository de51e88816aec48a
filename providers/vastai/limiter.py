"""Minimum intervals between calls, per endpoint.

Invariant: two calls of one kind start at least their interval apart; a 429 pushes the next one further out.
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

    async def wait(self, call: str) -> None:
        """Return when `call` may start; the turn is taken at once, so callers queue."""
        now = self._clock()
        start = max(now, self._next.get(call, now))
        self._next[call] = start + INTERVALS_S.get(call, 1.0) * self._scale
        if start > now:
            await self._sleep(start - now)

    def penalise(self, call: str, wait_s: float) -> None:
        """The provider said: not before `wait_s` seconds from now."""
        self._next[call] = max(self._next.get(call, 0.0), self._clock() + wait_s)
