"""What the machine was told about its end, and whether the control service has heard it.

Invariant: an interruption is never displaced by a weaker or a later word, and is shown until an answered heartbeat
carried it.
"""

from __future__ import annotations

import asyncio

from app.protocol.node import Interruption


class Board:
    """The one notice that is still to be told."""

    def __init__(self) -> None:
        self.doomed = False
        """The machine will be taken away."""
        self._pending: Interruption | None = None
        self._heard = asyncio.Event()
        self._heard.set()

    @property
    def pending(self) -> Interruption | None:
        """What the next heartbeat has to carry."""
        return self._pending

    def put(self, notice: Interruption) -> bool:
        """Note it; False if nothing new has to be told."""
        if self.doomed:
            return False
        self.doomed = notice.kind == "interruption"
        self._pending = notice
        self._heard.clear()
        return True

    def answered(self, carried: Interruption | None) -> None:
        """A heartbeat that carried this was answered."""
        if carried is not None and carried is self._pending:
            self._pending = None
            self._heard.set()

    async def told(self, timeout_s: float) -> bool:
        """Whether all was heard within that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        except TimeoutError:
            return False
        return True
