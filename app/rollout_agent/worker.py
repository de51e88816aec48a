"""The generation loop: lease, generate, pass on to delivery.

Invariant: work is leased only after a version was installed and never while draining; one batch is delivered while the
next one is generated, and at most two more wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from app.protocol.errors import Conflict, EchoError, Gone, Unauthorized, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import Report, WorkAnswer, WorkRequest
from app.rollout_agent.batch import Batch, Sampled, TextSide, sample
from app.rollout_agent.client import NodeClient, backoff
from app.rollout_agent.delivery import Delivery, report_softly
from app.rollout_agent.engines.base import Engine, Interrupted
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.measure import BatchSizer, Meter

log = logging.getLogger(__name__)

LEASE_WAIT_S, LEASE_WAIT_BEHIND_S = 2.0, 0.5
"""Long poll for work; shorter when a newer version is on its way, which opens more work."""
EMPTY_PAUSE_S = 0.1
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
        delivery: Delivery,
        ledger: WorkLedger,
        *,
        sampling: SamplingSpec,
        engine_pool: Executor,
        target_version: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._engine = engine
        self._text = text
        self._delivery = delivery
        self._ledger = ledger
        self._sampling = sampling
        self._engine_pool = engine_pool
        self._target_version = target_version
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._queue: asyncio.Queue[Sampled | None] = asyncio.Queue(maxsize=DELIVERY_QUEUE)
        self._installed = asyncio.Event()
        self._draining = asyncio.Event()
        self._misses = 0
        self._sizer = BatchSizer()
        self.meter = Meter()

    def installed(self) -> None:
        """A version is installed: work may be leased."""
        self._installed.set()

    def drain(self) -> None:
        """Lease nothing more; `run` returns once what is generated has been delivered."""
        self._draining.set()
        self._installed.set()

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

    async def _generate(self) -> None:
        await self._installed.wait()
        while not self._draining.is_set():
            batch = await self._lease()
            if batch is None:
                continue
            if self._draining.is_set():
                self._ledger.give_up(batch.deadlines)
                break
            sampled = await self._sample(batch)
            if sampled is not None:
                await self._queue.put(sampled)
        await self._queue.put(None)

    async def _deliver(self) -> None:
        while (sampled := await self._queue.get()) is not None:
            await self._delivery.finish(sampled)

    async def _lease(self) -> Batch | None:
        """The next batch, or None after a pause."""
        asked_at = self._clock()
        answer = await self._ask()
        if answer is None:
            return None
        now = self._clock()
        if answer.items and answer.upload is not None:
            batch = Batch(answer.items, answer.upload, {item.id: now + item.deadline_s for item in answer.items})
            self._ledger.leased(batch.deadlines)
            return batch
        if now - asked_at < EMPTY_PAUSE_S:
            await self._sleep(EMPTY_PAUSE_S)
        return None

    async def _ask(self) -> WorkAnswer | None:
        version, target = self._engine.version, self._target_version()
        if version is None:
            raise Unavailable("work was to be leased without an installed version")
        behind = target is not None and version < target
        request = WorkRequest(
            max_items=min(self._sizer.items, self._delivery.items_that_fit() or self._sizer.items),
            policy_version=version,
            wait_s=LEASE_WAIT_BEHIND_S if behind else LEASE_WAIT_S,
        )
        try:
            answer = await self._client.work(request)
        except (Gone, Unauthorized):
            raise
        except (Unavailable, Conflict) as error:
            log.info("no work: %s", error.detail)
        except EchoError as error:
            self._ledger.fault("work_refused", error.detail)
        else:
            self._misses = 0
            return answer
        await self._sleep(backoff(self._misses, self._jitter()))
        self._misses += 1
        return None

    async def _sample(self, batch: Batch) -> Sampled | None:
        """Generate in the engine's thread; None when that failed."""
        clock = self._clock

        def timed() -> tuple[float, Outcome, float]:
            began = clock()
            try:
                return began, sample(self._engine, self._text, batch, self._sampling), clock()
            except (EchoError, RuntimeError) as error:
                return began, error, clock()

        self.meter.begin(clock())
        began, outcome, ended = await asyncio.get_running_loop().run_in_executor(self._engine_pool, timed)
        if isinstance(outcome, Sampled):
            self.meter.end(began, ended, rollouts=outcome.rollouts, tokens=outcome.tokens)
            self._sizer.done(len(batch.items), ended - began)
            return outcome
        self.meter.end(began, ended)
        self._ledger.give_up(batch.deadlines)
        if not isinstance(outcome, Interrupted):
            await self._failed(outcome)
        return None

    async def _failed(self, error: EchoError | RuntimeError) -> None:
        """Count and report an engine error."""
        if isinstance(error, RuntimeError):
            # PyTorch's way to say that the memory does not suffice, the usual cause.
            self._sizer.out_of_memory()
        detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
        await report_softly(self._client, Report(kind="engine_error", subject="generate", detail=detail[:1000]))
        self._ledger.fault("engine_error", detail)
