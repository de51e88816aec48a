"""The generation loop: lease, generate, pass on to delivery.

Invariant: work is leased only after a version was installed and never while draining; one batch is delivered while the
next one is generated, and at most two more wait. A batch that is cut short is handed on: whole groups to delivery, the
others to whoever will finish them. Of one that fails only the groups are given up that fail by themselves. A fault and
a cancelled `run` are a drain too, with little time; what is not ready by then is given up, and counted as wasted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from app.protocol.errors import EchoError, TaskFailed
from app.protocol.job import SamplingSpec
from app.protocol.node import Report, WasteReason
from app.rollout_agent.batch import sample
from app.rollout_agent.client import NodeClient
from app.rollout_agent.closing import ended
from app.rollout_agent.delivery import Delivery, report_softly
from app.rollout_agent.engines.base import Engine, Interrupted
from app.rollout_agent.groups import Batch, Failed, Group, Sampled, written
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import REFUSED, WorkerFault, WorkLedger
from app.rollout_agent.measure import BatchSizer, Meter
from app.rollout_agent.partials import Partials
from app.rollout_agent.pieces import Pieces
from app.rollout_agent.text_side import TextSide

log = logging.getLogger(__name__)

DELIVERY_QUEUE = 2
LAST_S = 5.0
"""So long it may take to hand in and over what there is when there was no drain."""
STEP_S = 1800.0
"""Nothing else in the engine's thread takes longer: to put a version in force, or the replies of one round."""


class Worker:
    """Runs until `drain`, a fault (WorkerFault), or until the control service says that the node is over.

    `engine_pool` has one thread, which owns the engine.
    """

    def __init__(
        self,
        client: NodeClient,
        engine: Engine,
        text: TextSide,
        source: WorkSource,
        delivery: Delivery,
        partials: Partials,
        ledger: WorkLedger,
        *,
        sampling: SamplingSpec,
        engine_pool: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._engine = engine
        self._text = text
        self._source = source
        self._delivery = delivery
        self._partials = partials
        self._ledger = ledger
        self._sampling = sampling
        self._engine_pool = engine_pool
        self._clock = clock
        self._queue: asyncio.Queue[Sampled | None] = asyncio.Queue(maxsize=DELIVERY_QUEUE)
        self._pieces: Pieces | None = None
        """Of the batch that is sampled now."""
        self._coming: dict[str, Group] = {}
        """Groups that are sampled, and not settled or about to be handed over, by item."""
        self._installed, self._draining = asyncio.Event(), asyncio.Event()
        self._drain_by = math.inf
        self._life: asyncio.Task[None] | None = None
        self._fault: WorkerFault | None = None
        self._since: tuple[float, bool] | None = None
        """Of the batch that is generated: since when the engine is asked, or (False) something else goes on."""
        self._sizer = BatchSizer()
        self.meter = Meter()

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine was asked for what it is generating; 0 while there is no batch. What else goes on in
        its thread (a version that is put in force, the words of an environment) counts only when it takes too long."""
        if self._since is None:
            return 0.0
        at, asked = self._since
        seconds = self._clock() - at
        return seconds if asked or seconds > STEP_S else 0.0

    def installed(self) -> None:
        """A version is installed: work may be leased under it."""
        self._installed.set()
        self._source.wake()

    def drain(self, within_s: float) -> None:
        """Lease nothing more; a batch that is not ready in `within_s` seconds is cut short. `run` returns once what is
        generated has been delivered or handed over. May be called again with less time."""
        loop = asyncio.get_running_loop()
        self._drain_by = min(self._drain_by, loop.time() + within_s)
        self._draining.set()
        self._installed.set()
        self._source.wake()
        loop.call_later(within_s, self._engine.interrupt)

    async def run(self) -> None:
        """Work until drained. Raises WorkerFault, Gone, Unauthorized."""
        self._life = asyncio.create_task(self._live(), name="batches")
        try:
            await ended(self._life, self._hasten, LAST_S)
        finally:
            self._count_the_rest()
            await self._source.close()
        if self._fault is not None:
            raise self._fault

    def _hasten(self) -> bool:
        """Drain without delay, out of turn. False: it was to be over already."""
        late = asyncio.get_running_loop().time() >= self._drain_by
        self.drain(0.0)
        return not late

    def _faulty(self, fault: WorkerFault) -> None:
        """A fault ends all work, but not at once: `run` raises it."""
        if self._fault is None and self._life is not None:
            self._fault = fault
            self._hasten()
            asyncio.get_running_loop().call_later(LAST_S, self._life.cancel)

    def _count_the_rest(self) -> None:
        """What did not get away in time. An engine that does not come back has told nothing of its batch."""
        for group in self._coming.values():
            self._ledger.waste("refused" if group.whole else "interrupted", group.own_tokens)
        if self._pieces is not None:
            self._ledger.waste("interrupted", self._pieces.own_tokens)

    async def _live(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._generate())
                tasks.create_task(self._deliver())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _generate(self) -> None:
        await self._installed.wait()
        try:
            await self._work()
        except WorkerFault as fault:
            self._faulty(fault)
        await self._queue.put(None)

    async def _work(self) -> None:
        while not self._draining.is_set():
            batch = await self._source.next(self._max_items())
            if batch is None:
                continue
            if not self._draining.is_set():
                batch = await self._taken_up(batch)
            self._pieces = Pieces(batch)
            if not self._draining.is_set():
                await self._work_on(self._pieces)
            await self._pass_on(self._pieces)

    async def _work_on(self, pieces: Pieces) -> None:
        """Sample a batch and pass it on. One that fails is halved, so that no group suffers for another one, or for
        there being too many of them. What it leaves is for others."""
        culprits, most, short_of_memory = 0, 0, False
        while (part := pieces.next()) is not None:
            outcome = await self._sample(part)
            if isinstance(outcome, Sampled):
                most = max(most, len(part.items))
                self._coming |= {group.item.id: group for group in outcome.groups}
                pieces.done()
                await self._queue.put(outcome)
                continue
            pieces.failed(part, outcome)
            if isinstance(outcome.error, Interrupted):
                return
            self._ledger.waste(reason_of(outcome.error), outcome.lost(part))
            if len(part.items) > 1:
                # PyTorch's way to say that the memory does not suffice, the usual cause.
                short_of_memory |= isinstance(outcome.error, RuntimeError)
                pieces.halve()
                continue
            culprits += 1
            try:
                await self._failed(outcome.error, pieces, alone=not most)
            except WorkerFault as fault:
                self._faulty(fault)
                return
        while short_of_memory and not culprits and self._sizer.items > most:
            self._sizer.out_of_memory()

    async def _pass_on(self, pieces: Pieces) -> None:
        """What is left of a batch is for others, with what there is of it."""
        if rest := pieces.rest():
            await self._partials.hand_over(rest)

    def _max_items(self) -> int:
        fit = self._delivery.items_that_fit()
        return self._sizer.items if fit is None else min(self._sizer.items, fit)

    async def _deliver(self) -> None:
        while (sampled := await self._queue.get()) is not None:
            finished, handed_over = await asyncio.gather(
                self._delivery.finish(sampled), self._hand_over(sampled.cut), return_exceptions=True
            )
            if finished is None or isinstance(finished, WorkerFault):
                # What was lost of it is counted.
                for group in sampled.whole:
                    self._coming.pop(group.item.id, None)
            for error in (handed_over, finished):
                if isinstance(error, WorkerFault) and error.kind not in REFUSED:
                    self._faulty(error)
                elif error is not None:
                    # From an engine whose files are refused nobody should go on.
                    raise error

    async def _hand_over(self, groups: Sequence[Group]) -> None:
        for group in groups:
            # It counts itself what nobody takes.
            self._coming.pop(group.item.id, None)
        await self._partials.hand_over(groups)

    async def _sample(self, batch: Batch) -> Sampled | Failed:
        """Generate in the engine's thread."""
        clock = self._clock
        loop = asyncio.get_running_loop()

        def timed() -> tuple[float, Sampled | Failed, float]:
            began = clock()
            return began, sample(self._engine, self._text, batch, self._sampling, self._asking), clock()

        self.meter.begin(clock())
        self._since = clock(), False
        began, outcome, ended_at = await loop.run_in_executor(self._engine_pool, timed)
        self._since = None
        self._ledger.sampled(outcome.tokens)
        if isinstance(outcome, Sampled):
            self.meter.end(began, ended_at, rollouts=outcome.rollouts, tokens=outcome.tokens)
            self._sizer.done(len(batch.items), ended_at - began)
        else:
            self.meter.end(began, ended_at)
        return outcome

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """In the engine's thread, while it generates."""
        self._since = self._clock(), True
        try:
            yield
        finally:
            self._since = self._clock(), False

    async def _taken_up(self, batch: Batch) -> Batch:
        """The batch with what other nodes have begun of it."""
        if all(item.partial is None for item in batch.items):
            return batch
        try:
            _, prompt_ids = await asyncio.to_thread(self._text.encode, batch.items)
        except EchoError:
            # Sampling will meet it again, and tell of it.
            return batch
        begun = await self._partials.begun(batch.items, prompt_ids)
        return replace(batch, begun=begun, foreign={item: written(samples) for item, samples in begun.items()})

    async def _failed(self, error: EchoError | RuntimeError, pieces: Pieces, *, alone: bool) -> None:
        """Count and report a group that can't be sampled, which is somebody else's at once. `alone`: nothing of its
        batch could be so far."""
        [group] = pieces.drop()
        item = group.item
        self._ledger.give_up([item.id])
        self._ledger.waste(reason_of(error), group.own_tokens)
        detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, TaskFailed):
            report = Report(kind="engine_error", subject="generate", detail=detail[:1000], work_items=[item.id])
            await report_softly(self._client, report)
            self._ledger.fault("engine_error", detail)
            return
        self._ledger.errors["task_error"] += 1
        await report_softly(self._client, Report(kind="task_error", subject=item.id, detail=detail[:1000]))
        if alone:
            self._ledger.fault("unscored_batch", detail)


def reason_of(error: EchoError | RuntimeError) -> WasteReason:
    """Why tokens are lost that went with this error."""
    return "task_error" if isinstance(error, TaskFailed) else "engine_died"
