"""Where the seconds of a step go.

Invariant: every moment between `start` and the last `lap` is counted once, under the name of the lap that ended it.
"""

from __future__ import annotations

from collections.abc import Callable


class Laps:
    """A stopwatch. `settle` waits until the device has done what it was given, so that it counts where it was given."""

    def __init__(self, clock: Callable[[], float], settle: Callable[[], object]) -> None:
        self._clock = clock
        self._settle = settle
        self._last = clock()
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        """From zero."""
        self._last, self._seconds = self._clock(), {}

    def lap(self, name: str) -> None:
        """What has passed since the last lap was `name`."""
        self._settle()
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds as `t_{name}`."""
        return {f"t_{name}": seconds for name, seconds in self._seconds.items()}
