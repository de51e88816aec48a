"""A token bucket: how long a sender has to wait so that all its streams together stay under a rate.

Invariant: over any span the bytes granted are at most rate × span + burst + one piece. Callers are served in the order
of asking, which shares the rate equally among streams that send equal pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HEADROOM = 0.97
"""Share of the link that is used: a sender a little under the link keeps queues short and avoids losses."""


class Pacer:
    """Hands out sending times. Not thread-safe: one event loop. `bytes_per_s` None means no limit."""

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        burst_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be more than 0 or None, not {bytes_per_s}")
        self._rate = bytes_per_s
        self._burst_s = burst_s
        self._clock = clock
        self._free_at = clock() - burst_s

    def reserve(self, count: int) -> float:
        """Book `count` bytes and return the seconds to wait before sending them (0 when they fit now)."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        start = max(self._free_at, now - self._burst_s)
        self._free_at = start + count / self._rate
        return max(0.0, start - now)
