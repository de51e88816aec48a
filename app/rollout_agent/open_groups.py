"""What a continuous worker has leased, until it is handed in, handed over or given up.

Invariant: a leased group is in one place: open, on its way in the outbox, or let go and counted. `changed` is called
whenever there may be room for another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from app.protocol.node import WasteReason
from app.protocol.work import WorkItem
from app.rollout_agent.delivery import HOPELESS_AFTER_S, Delivery, Scored
from app.rollout_agent.engines.base import StreamEngine
from app.rollout_agent.ledger import WorkerFault, WorkLedger
from app.rollout_agent.opened import Open, is_stale
from app.rollout_agent.outbox import Outbox
from app.rollout_agent.partials import Partials
from app.rollout_agent.sampling import Sampler

log = logging.getLogger(__name__)


class OpenGroups:
    """`clock`: monotonic seconds."""

    def __init__(
        self,
        engine: StreamEngine,
        sampler: Sampler,
        ledger: WorkLedger,
        partials: Partials,
        delivery: Delivery,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._sampler = sampler
        self._ledger = ledger
        self._partials = partials
        self._clock = clock
        self._changed = changed
        self._open: dict[str, Open] = {}
        self._going: dict[str, int] = {}
        """Tokens of whole groups until they are handed in, by item."""
        self._outbox = Outbox(delivery, clock, self._sent)

    @property
    def in_flight(self) -> int:
        """Samples that are leased and not finished."""
        return sum(opened.pending for opened in self._open.values())

    @property
    def sampled(self) -> int:
        """Groups whose samples are all there, and which are not handed in yet."""
        return len(self._outbox) + sum(not opened.pending for opened in self._open.values())

    @property
    def working(self) -> set[asyncio.Task[None]]:
        """What runs for groups that are open."""
        tasks = (opened.task for opened in self._open.values())
        return {task for task in tasks if task is not None and not task.done()}

    def admit(self, item: WorkItem, deadline: float) -> Open | None:
        """A leased item; None if it is being worked on. A lease that was over may come back to where its group is."""
        if (working := self._open.get(item.id)) is not None:
            working.deadline = deadline
        if working is not None or item.id in self._going:
            return None
        opened = Open(item, deadline, self._clock(), self._engine.version)
        self._open[item.id] = opened
        return opened

    def finish(self, opened: Open, scored: Sequence[Scored]) -> None:
        """A group goes to the outbox, or nowhere if it could not be scored."""
        self._open.pop(opened.item.id, None)
        self._going |= {s.group.item.id: s.group.own_tokens for s in scored}
        self._outbox.put(scored)

    def drop(self, opened: Open, reason: WasteReason) -> None:
        """Let a group go, and count what it has."""
        self._open.pop(opened.item.id, None)
        self._sampler.lose(opened.item.id, reason)
        self._ledger.waste(reason, opened.tokens)
        self._ledger.give_up([opened.item.id])
        self._changed()

    def drop_stale(self, floor: int | None) -> None:
        """Let go of groups that nobody wants any more. `floor`: the oldest version that is of use."""
        for opened in list(self._open.values()):
            if opened.task is not None and is_stale(opened, self._clock(), floor, HOPELESS_AFTER_S):
                log.info("work item %s is too old or too late, and given up", opened.item.id)
                self.drop(opened, "stale")
                opened.task.cancel()

    def drop_all(self) -> None:
        """The end: what is still here comes to nothing."""
        for opened in list(self._open.values()):
            self.drop(opened, "interrupted")
        self._ledger.waste("refused", sum(self._going.values()))

    async def hand_over(self) -> None:
        """Give what is unfinished to other nodes."""
        unfinished = list(self._open.values())
        self._open.clear()  # from here on the partials count what is lost of them
        for opened in unfinished:
            self._sampler.lose(opened.item.id, "interrupted")
        await self._partials.hand_over([opened.group(self._engine.quantisation) for opened in unfinished])

    async def hand_in(self) -> None:
        """Empty the outbox until it is closed. Raises WorkerFault, Gone, Unauthorized."""
        # A fault here is raised at once: from an engine whose files are refused nobody should go on.
        try:
            await self._outbox.run()
        except WorkerFault:
            self._sent()
            raise

    def close(self) -> None:
        """Nothing more will be scored."""
        self._outbox.close()

    def _sent(self) -> None:
        """A file is settled, and its tokens are counted: what is left is in the outbox."""
        self._going = {item: tokens for item, tokens in self._going.items() if item in self._outbox}
        self._changed()
