"""How far this node's start has come, for whoever pays for the machine meanwhile.

Invariant: it only tells; nothing in a start waits for its being heard.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from app.protocol.errors import EchoError
from app.protocol.startup import StartPhase, StartProgress

log = logging.getLogger(__name__)


class Startup:
    """The phase, since when (monotonic seconds of `clock`), and bytes. `changed` is called when the phase changes."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._changed = changed
        self._phase = StartPhase.JOINING
        self._since = clock()
        self._detail = ""
        self._have: int | None = None
        self._total: int | None = None

    @property
    def phase(self) -> StartPhase:
        """Where it is now."""
        return self._phase

    def enter(self, phase: StartPhase, detail: str = "", *, total: int | None = None) -> None:
        """The next phase begins; of its `total` bytes none are there yet."""
        if phase is not self._phase:
            self._since = self._clock()
        self._phase, self._detail, self._total = phase, detail, total
        self._have = None if total is None else 0
        self._changed()

    def bytes(self, have: int, total: int | None = None, detail: str | None = None) -> None:
        """So many bytes of this phase are there."""
        self._have = have
        self._total = total if total is not None else self._total
        self._detail = detail if detail is not None else self._detail

    def told(self, have: int | None = None, total: int | None = None) -> StartProgress:
        """As it is now; `have` and `total` where somebody else counts the bytes."""
        return StartProgress(
            phase=self._phase,
            detail=self._detail[:200],
            have=self._have if have is None else have,
            total=self._total if total is None else total,
            since_s=max(0.0, self._clock() - self._since),
        )


async def tell(send: Callable[[StartProgress], Awaitable[None]], startup: Startup) -> None:
    """Tell it before there is a heartbeat; that nobody hears it changes nothing."""
    try:
        await send(startup.told())
    except EchoError as error:
        log.debug("progress was not heard: %s", error.detail)
