"""Whether the object store can be used, and what is said while it can't.

Invariant: a store that does not answer holds up no round and ends nothing: a job without machines waits for it, with a
reason and a since-when, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from app.protocol.errors import EchoError, Unavailable
from app.storage.objects import ObjectStore

log = logging.getLogger(__name__)

CHECK_EACH_S = 60.0
"""While it answers. While it does not it is asked in every round."""
PATIENCE_S = 2.0
"""So long a round waits for the answer; it may come later."""
ANSWER_S = 20.0
"""A check without an answer for so long counts as one that failed."""
BRIEF_S = 60.0
"""A store that was there before and is away for less than this is no reason to call the service unready."""
WAITS = "waits for the object store"


@dataclass(frozen=True, slots=True)
class Away:
    """The store can't be used: one line that names the setting, and since when. Seconds of the service's clock."""

    why: str
    since: float
    known: bool
    """Whether this process has ever been answered."""

    def lasts(self, now: float) -> bool:
        """Whether it is more than a blip. Pure."""
        return not self.known or now - self.since >= BRIEF_S


class StoreWatch:
    """Asks the store whether it can be used, one question at a time."""

    def __init__(self, objects: ObjectStore, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        self.objects = objects
        self.clock = clock
        self.patience_s = patience_s
        self.away: Away | None = None
        self._known = False
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Ask if it is due, and wait a little for the answer."""
        now = self.clock()
        self._settle()
        if self._asking is None:
            if self.away is None and self._asked_at is not None and now - self._asked_at < CHECK_EACH_S:
                return
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        elif self._asked_at is not None and now - self._asked_at >= ANSWER_S:
            self._failed(
                Unavailable(f"ECHO2_OBJECT_STORE_URL: the object store gave no answer within {ANSWER_S:.0f} s")
            )
        await asyncio.wait({self._asking}, timeout=self.patience_s)
        self._settle()

    def _settle(self) -> None:
        """Let go of a question that was answered, be it long after its round."""
        if self._asking is not None and self._asking.done():
            asking, self._asking = self._asking, None
            asking.result()

    async def stop(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
            self._asking = None

    async def _ask(self) -> None:
        try:
            await asyncio.to_thread(self.objects.check)
        except EchoError as error:
            self._failed(error)
            return
        if self.away is not None:
            log.info("the object store can be used again")
        self._known, self.away = True, None

    def _failed(self, error: EchoError) -> None:
        before = self.away
        if before is None or before.why != error.detail:
            log.error("the object store can't be used; new jobs wait for it: %s", error.detail)
        self.away = Away(error.detail, self.clock() if before is None else before.since, self._known)
