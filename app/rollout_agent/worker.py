"""The generation loop: lease, generate, pass on to delivery.

Invariant: work is leased only after a version was installed and never while draining; one batch is delivered while the
next one is generated, and at most two more wait. A batch that is cut short is handed on: whole groups to delivery, the
others to whoever will finish them. Of one that fails only the groups are given up that fail by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from app.protocol.errors import EchoError, TaskFailed
from app.protocol.job import SamplingSpec
from app.protocol.node import Report
from app.protocol.work import WorkItem
from app.rollout_agent.batch import Batch, Sampled, TextSide, sample
from app.rollout_agent.client import NodeClient
from app.rollout_agent.delivery import Delivery, report_softly
from app.rollout_agent.engines.base import Engine, Interrupted
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.measure import BatchSizer, Meter
from app.rollout_agent.partials import Partials

log = logging.getLogger(__name__)

DELIVERY_QUEUE = 2

Outcome = Sampled | EchoError | RuntimeError


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
        self._installed = asyncio.Event()
        self._draining = asyncio.Event()
        self._sizer = BatchSizer()
        self.meter = Meter()

    @property
    def stalled_s(self) -> float:
        """Seconds since the batch that is generated now began; 0 while there is none."""
        return self.meter.running_s(self._clock())

    def installed(self) -> None:
        """A version is installed: work may be leased under it."""
        self._installed.set()
        self._source.wake()

    def drain(self, within_s: float) -> None:
        """Lease nothing more; a batch that is not ready in `within_s` seconds is cut short. `run` returns once what is
        generated has been delivered or handed over. May be called again with less time."""
        self._draining.set()
        self._installed.set()
        self._source.wake()
        asyncio.get_running_loop().call_later(within_s, self._engine.interrupt)

    async def run(self) -> None:
        """Work until drained. Raises WorkerFault, Gone, Unauthorized."""
        tasks = [
            asyncio.create_task(self._generate(), name="generate"),
            asyncio.create_task(self._deliver(), name="deliver"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._source.close()

    async def _generate(self) -> None:
        await self._installed.wait()
        while not self._draining.is_set():
            batch = await self._source.next(self._max_items())
            if batch is None:
                continue
            if self._draining.is_set():
                self._ledger.give_up(batch.deadlines)
                await self._partials.hand_back(list(batch.deadlines))
                break
            await self._work_on(await self._taken_up(batch))
        await self._queue.put(None)

    async def _work_on(self, batch: Batch) -> None:
        """Sample a batch and pass it on. One that fails is halved, so that no group suffers for another one, or for
        there being too many of them."""
        parts, culprits, most = [batch], 0, 0
        short_of_memory = False
        while parts:
            part = parts.pop()
            outcome = await self._sample(part)
            if isinstance(outcome, Sampled):
                most = max(most, len(part.items))
                await self._queue.put(outcome)
            elif isinstance(outcome, Interrupted):
                left = [item for rest in (part, *parts) for item in rest.deadlines]
                self._ledger.give_up(left)
                await self._partials.hand_back(left)
                return
            elif len(part.items) > 1:
                # PyTorch's way to say that the memory does not suffice, the usual cause.
                short_of_memory |= isinstance(outcome, RuntimeError)
                parts += reversed(halves(part))
            else:
                culprits += 1
                await self._failed(outcome, part.items[0], alone=not most)
        while short_of_memory and not culprits and self._sizer.items > most:
            self._sizer.out_of_memory()

    def _max_items(self) -> int:
        fit = self._delivery.items_that_fit()
        return self._sizer.items if fit is None else min(self._sizer.items, fit)

    async def _deliver(self) -> None:
        while (sampled := await self._queue.get()) is not None:
            await asyncio.gather(self._delivery.finish(sampled), self._partials.hand_over(sampled.cut))

    async def _sample(self, batch: Batch) -> Outcome:
        """Generate in the engine's thread."""
        clock = self._clock
        loop = asyncio.get_running_loop()

        def timed() -> tuple[float, Outcome, float]:
            began = clock()
            try:
                return began, sample(self._engine, self._text, batch, self._sampling), clock()
            except (EchoError, RuntimeError) as error:
                return began, error, clock()

        self.meter.begin(clock())
        began, outcome, ended = await loop.run_in_executor(self._engine_pool, timed)
        if isinstance(outcome, Sampled):
            self._ledger.sampled(outcome.tokens)
            self.meter.end(began, ended, rollouts=outcome.rollouts, tokens=outcome.tokens)
            self._sizer.done(len(batch.items), ended - began)
        else:
            self.meter.end(began, ended)
        return outcome

    async def _taken_up(self, batch: Batch) -> Batch:
        """The batch with what other nodes have begun of it."""
        if all(item.partial is None for item in batch.items):
            return batch
        try:
            _, prompt_ids = await asyncio.to_thread(self._text.encode, batch.items)
        except EchoError:
            # Sampling will meet it again, and tell of it.
            return batch
        return replace(batch, begun=await self._partials.begun(batch.items, prompt_ids))

    async def _failed(self, error: EchoError | RuntimeError, item: WorkItem, *, alone: bool) -> None:
        """Count and report a group that can't be sampled, which is somebody else's at once. `alone`: nothing of its
        batch could be so far."""
        self._ledger.give_up([item.id])
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


def halves(batch: Batch) -> list[Batch]:
    """A batch of several items as two, each of which asks for a place of its own."""
    middle = len(batch.items) // 2
    return [
        replace(batch, items=items, slot=None, deadlines={item.id: batch.deadlines[item.id] for item in items})
        for items in (batch.items[:middle], batch.items[middle:])
    ]
