"""What a download has to tell about its sources, told beside it.

Invariant: telling never holds up the download. What a callback raises ends the task group, and so the puller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.snapshots.sources import Source

log = logging.getLogger(__name__)

UNKNOWN_VERSION = -1

Notice = Callable[[Source, int, str], Awaitable[None]]
"""(source, version or −1 when it can't be told, detail)."""


class Notices:
    """Calls `on_lie`, `on_stall` and `on_refused` as tasks of the group that `within` named."""

    def __init__(self, *, on_lie: Notice, on_stall: Notice | None, on_refused: Notice | None) -> None:
        self._on_lie = on_lie
        self._on_stall = on_stall
        self._on_refused = on_refused
        self._tasks: asyncio.TaskGroup | None = None

    def within(self, tasks: asyncio.TaskGroup) -> None:
        """The group whose tasks the callbacks become; before, nothing may be told."""
        self._tasks = tasks

    def lied(self, source: Source, version: int, detail: str) -> None:
        """A source sent what can't be right."""
        log.warning("%s lied about v%d: %s", source.label, version, detail)
        self._tell(self._on_lie, source, version, detail)

    def stalled(self, source: Source, version: int, detail: str) -> None:
        """A source was left in the middle of a version."""
        self._tell(self._on_stall, source, version, detail)

    def refused(self, source: Source, version: int, detail: str) -> None:
        """A delta that came as it was signed can't be applied."""
        log.warning("the delta of v%d can't be applied: %s", version, detail)
        self._tell(self._on_refused, source, version, detail)

    def _tell(self, notice: Notice | None, source: Source, version: int, detail: str) -> None:
        if notice is None:
            return

        async def deliver() -> None:
            await notice(source, version, detail)

        assert self._tasks is not None
        self._tasks.create_task(deliver())
