"""Time as an input.

Invariant: time never runs backwards, whatever happens to the wall clock: money is counted from differences of it.
"""

from __future__ import annotations

import time
from typing import Protocol

NS = 1_000_000_000


class Clock(Protocol):
    """Nanoseconds since the epoch."""

    def now_ns(self) -> int:
        """Now, never less than at the call before."""
        ...


class SystemClock:
    """The wall clock as it was at the start, carried on by the monotonic one."""

    def __init__(self) -> None:
        self._wall = time.time_ns()
        self._mono = time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return self._wall + time.monotonic_ns() - self._mono
