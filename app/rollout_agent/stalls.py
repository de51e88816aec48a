"""Notices when generation hangs: something runs, and nothing comes out.

Invariant: a machine that is merely slow is left alone: the bound follows what is usual for it, and an engine that can
be asked hangs only if it does not answer. One that hangs is put right once, and gives itself back when it hangs again
within the hour.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from app.protocol.errors import Unavailable

log = logging.getLogger(__name__)

LEAST_S = 60.0
TIMES_USUAL = 10.0
LEAST_SILENT_S, TIMES_BETWEEN = 30.0, 20.0
"""As long as this and so many times the measured seconds between two results, and an engine is asked early."""
LOOK_S = 5.0
HOUR_S = 3600.0
TOLERATED = 2
"""So many in an hour, and the node leaves."""
PROBE_S = 30.0
"""An engine that has nothing wrong gives one token in that time, however full it is."""
EARLY_PROBES = 2
"""So many in a row have to fail: one may have met an engine that was busy with something else."""


class Hung(Unavailable):
    """Generation hangs, and nothing that this process may do puts it right."""

    code = "hung"
    title = "Hung"


def hangs(stalled_s: float, usual_s: float | None) -> bool:
    """Whether `stalled_s` seconds without a result, while something runs, are too many. `usual_s`: from one result to
    the next, or of a batch, on this machine; None while that is not known."""
    return stalled_s > max(LEAST_S, TIMES_USUAL * (usual_s or 0.0))


def silent(quiet_s: float, between_s: float | None) -> bool:
    """Whether `quiet_s` seconds without a result are reason to ask an engine whether it lives. `between_s`: smoothed
    from one result to the next; None while that is not known."""
    return between_s is not None and quiet_s > max(LEAST_SILENT_S, TIMES_BETWEEN * between_s)


def judge(now: float, before: Sequence[float], *, healthy: bool | None) -> Literal["wait", "restart", "leave"]:
    """What to do about a stall at `now`. `before`: when others were; `healthy`: whether the engine gives a token when
    asked for one, None where it can't be asked or started anew."""
    if healthy:
        # It lives: whoever waits for it is at fault, or it is slower than it was.
        return "wait"
    recent = sum(1 for at in before if now - at < HOUR_S)
    return "leave" if healthy is None or recent + 1 >= TOLERATED else "restart"


class StallWatch:
    """Looks every few seconds until cancelled.

    `stalled_s`: seconds since the last result while something runs, 0 while nothing does. `usual_s`: see `hangs`;
    `between_s`: see `silent`. `healthy` probes the engine, None if it can't be probed; `restart` loads it and puts the
    version in force again; `report` tells of the stall. `swapping`: whether the engine is being loaded or takes a
    version, within its own time for that: then nothing can come out, and the time in which it must begins anew.
    """

    def __init__(
        self,
        *,
        stalled_s: Callable[[], float],
        usual_s: Callable[[], float | None],
        healthy: Callable[[float], Awaitable[bool]] | None,
        restart: Callable[[], Awaitable[None]] | None,
        report: Callable[[str], Awaitable[None]],
        clock: Callable[[], float],
        between_s: Callable[[], float | None] = lambda: None,
        swapping: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._stalled_s = stalled_s
        self._usual_s = usual_s
        self._healthy = healthy
        self._restart = restart
        self._report = report
        self._clock = clock
        self._between_s = between_s
        self._swapping = swapping
        self._sleep = sleep
        self._stalls: list[float] = []
        self._answered_at = -math.inf
        """When a probe succeeded last, or the engine was restarted, or was seen to take a version."""
        self._missed = 0
        """Probes in a row that failed."""

    async def run(self) -> None:
        """Watch. Raises Hung, or what `restart` raises."""
        while True:
            await self._sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Once. Raises Hung."""
        if self._swapping():
            self._answered()
            return
        stalled = self._stalled_s()
        # An answer to a probe is a result, too: the next one is not due sooner after it.
        quiet = min(stalled, self._clock() - self._answered_at)
        hung = hangs(quiet, self._usual_s())
        if not hung and not silent(quiet, self._between_s()):
            self._missed = 0
            return
        healthy = await self._probe()
        if not healthy and self._swapping():
            # It began while the probe was out.
            self._answered()
        elif healthy:
            log.warning("nothing was generated for %.0f s, but the engine answers", stalled)
        elif hung or self._missed >= EARLY_PROBES:
            await self._stalled(stalled, healthy)

    async def _probe(self) -> bool | None:
        """See `judge`."""
        if self._healthy is None or self._restart is None:
            return None
        healthy = await self._healthy(PROBE_S)
        if healthy:
            self._answered()
        else:
            self._missed += 1
        return healthy

    def _answered(self) -> None:
        self._answered_at = self._clock()
        self._missed = 0

    async def _stalled(self, stalled: float, healthy: bool | None) -> None:
        """Tell of a stall of so many seconds, and restart or leave."""
        now = self._clock()
        verdict = judge(now, self._stalls, healthy=healthy)
        self._stalls.append(now)
        self._missed = 0
        words = f"nothing was generated for {stalled:.0f} s while something runs"
        log.error("%s", words)
        await self._report(words)
        if verdict == "leave" or self._restart is None:
            raise Hung(f"{words}; the engine hangs")
        await self._restart()
        self._answered_at = self._clock()
