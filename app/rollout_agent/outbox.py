"""Scored groups on their way out.

Invariant: a group waits only for the file before it; groups that are ready at the same moment share one. A group whose
lease is over goes only with others whose lease is, and kinds don't mix, since a file may be refused as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from app.rollout_agent.delivery import Delivery, Scored


class Outbox:
    """Run `run` as a task; it ends after `close`, once all is handed in, or with what `Delivery.hand_in` raises."""

    def __init__(self, delivery: Delivery, clock: Callable[[], float], sent: Callable[[], None]) -> None:
        self._delivery = delivery
        self._clock = clock
        self._sent = sent
        self._ready: list[Scored] = []
        self._closed = False
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, item: str) -> bool:
        return any(scored.group.item.id == item for scored in self._ready)

    def put(self, scored: Sequence[Scored]) -> None:
        """These are ready."""
        self._ready += scored
        self._news.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._news.set()

    async def run(self) -> None:
        """Hand in, one file after the other; `sent` is called after each. Raises WorkerFault, Gone, Unauthorized."""
        while self._ready or not self._closed:
            if not self._ready:
                self._news.clear()
                await self._news.wait()
                continue
            together = shareable(self._ready, self._delivery.items_that_fit(), self._clock())
            taken = {scored.group.item.id for scored in together}
            self._ready = [scored for scored in self._ready if scored.group.item.id not in taken]
            await self._delivery.hand_in(together)
            self._sent()


def shareable(ready: Sequence[Scored], most: int | None, now: float) -> list[Scored]:
    """The first group that waits, and those that may go into one file with it, at most `most` in all."""

    def kind(scored: Scored) -> tuple[bool, str, str | None]:
        group = scored.group
        return group.deadline > now, group.item.split, group.quantisation

    return [s for s in ready if kind(s) == kind(ready[0])][: most or None]
