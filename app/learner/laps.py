"""Where the seconds of a step go.

Invariant: every moment between `start` and the last `lap` is counted once, under the name of the lap that ended it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Laps:
    """A stopwatch. `mark` makes a mark of this moment, `between` says the seconds from one mark to another: so that a
    GPU's time can be told without waiting for it at each lap."""

    def __init__(self, mark: Callable[[], Any], between: Callable[[Any, Any], float]) -> None:
        self._mark = mark
        self._between = between
        self._last = mark()
        self._laps: list[tuple[str, Any, Any]] = []

    def start(self) -> None:
        """From zero."""
        self._last, self._laps = self._mark(), []

    def lap(self, name: str) -> None:
        """What has passed since the last lap was `name`."""
        now = self._mark()
        self._laps.append((name, self._last, now))
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds as `t_{name}`. Waits for the last mark's moment."""
        seconds: dict[str, float] = {}
        for name, before, after in self._laps:
            seconds[f"t_{name}"] = seconds.get(f"t_{name}", 0.0) + self._between(before, after)
        return seconds
