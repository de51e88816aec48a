"""Continuous work for an engine that takes samples one by one: lease, sample, hand in, without batches.

Invariant: the samples in flight follow a target that the engine's own figures set; a group is scored and on its way as
soon as its last sample is finished, and waits for nobody. After `drain` nothing is leased, and every group is handed in
whole, handed over unfinished, or given up. A fault and a cancelled `run` are such a drain too, with little time; what
is not ready by then is given up, and counted as wasted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from app.protocol.errors import EchoError, Gone, TaskFailed, Unauthorized
from app.protocol.job import SamplingSpec
from app.protocol.node import Report
from app.rollout_agent.batch import sampling_of
from app.rollout_agent.client import NodeClient
from app.rollout_agent.closing import end_within, ended
from app.rollout_agent.delivery import Delivery, report_softly
from app.rollout_agent.engines.base import Completion, StreamEngine
from app.rollout_agent.flow import Filling, FlowMeter
from app.rollout_agent.groups import Batch, own_share, written
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import WorkerFault, WorkLedger
from app.rollout_agent.open_groups import OpenGroups
from app.rollout_agent.opened import Open
from app.rollout_agent.partials import Partials
from app.rollout_agent.sampling import Ask, Sampler
from app.rollout_agent.text_side import TextSide

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""So often the engine's figures are read."""
CUT_S, LEAST_CUT_S = 5.0, 2.0
"""So long samples may take to come back after `abort`; less where there was little time."""
LAST_S = 5.0
"""So long it may take to hand over what is unfinished when there was no drain."""
UNSCORED = 8
"""So many groups in a row without a reward are a fault."""


class StreamWorker:
    """Runs until `drain`, a fault (WorkerFault), or until the control service says that the node is over.

    `oldest_admissible`: see Directives. `filling` says how many samples are to be in flight.
    """

    def __init__(
        self,
        client: NodeClient,
        engine: StreamEngine,
        text: TextSide,
        source: WorkSource,
        delivery: Delivery,
        partials: Partials,
        sampler: Sampler,
        ledger: WorkLedger,
        *,
        sampling: SamplingSpec,
        filling: Filling,
        text_pool: Executor,
        oldest_admissible: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
    ) -> None:
        self._client = client
        self._engine = engine
        self._text = text
        self._source = source
        self._delivery = delivery
        self._partials = partials
        self._groups = OpenGroups(engine, sampler, ledger, partials, delivery, clock, self._room_changed)
        self._sampler = sampler
        self._ledger = ledger
        self._sampling = sampling
        self._text_pool = text_pool
        self._oldest_admissible = oldest_admissible
        self._clock = clock
        self._look_s = look_s
        self._filling = filling
        self._unscored = 0
        self._drain_by, self._cut_s = 0.0, CUT_S
        self._installed, self._draining = asyncio.Event(), asyncio.Event()
        self._freed, self._hurry = asyncio.Event(), asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._life: asyncio.Task[None] | None = None
        self._fault: WorkerFault | None = None
        self.meter = FlowMeter()

    @property
    def target(self) -> int:
        """Samples that should be in flight."""
        return self._filling.samples

    @property
    def in_flight(self) -> int:
        """Samples that are leased and not finished."""
        return self._groups.in_flight

    @property
    def stalled_s(self) -> float:
        """Seconds since anything last came out of the engine while something is being sampled; else 0."""
        return self._sampler.stalled_s

    def installed(self) -> None:
        """A version is installed: work may be leased under it."""
        self._installed.set()
        self._source.wake()

    def drain(self, within_s: float) -> None:
        """Lease nothing more; what is not finished in `within_s` seconds is cut and handed over. `run` returns once
        all is delivered. May be called again with less time."""
        by = asyncio.get_running_loop().time() + within_s
        self._drain_by = min(self._drain_by, by) if self._draining.is_set() else by
        self._cut_s = min(self._cut_s, max(LEAST_CUT_S, 2 * within_s))
        for event in (self._draining, self._installed, self._freed, self._hurry):
            event.set()
        self._source.wake()

    async def run(self) -> None:
        """Work until drained. Raises WorkerFault, Gone, Unauthorized."""
        self._life = asyncio.create_task(self._live(), name="continuous work")
        try:
            await ended(self._life, self._hasten, LAST_S)
        finally:
            self._groups.drop_all()
            self._sampler.close()
            await self._source.close()
        if self._fault is not None:
            raise self._fault

    def _hasten(self) -> bool:
        """Drain without delay, out of turn. False: it was to be over already."""
        late = self._draining.is_set() and asyncio.get_running_loop().time() >= self._drain_by
        self.drain(0.0)
        return not late

    async def _unless_fault(self, work: Awaitable[None]) -> None:
        """A fault ends all work, but not at once: `run` raises it."""
        try:
            await work
        except WorkerFault as fault:
            if self._fault is None and self._life is not None:
                self._fault = fault
                self._hasten()
                asyncio.get_running_loop().call_later(LAST_S, self._life.cancel)

    async def _live(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                feeding = [
                    tasks.create_task(self._unless_fault(self._feed())),
                    tasks.create_task(self._look_for_ever()),
                ]
                tasks.create_task(self._groups.hand_in())
                await self._draining.wait()
                for task in feeding:
                    task.cancel()
                await self._wind_down()
                self._groups.close()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def _room_changed(self) -> None:
        self._freed.set()

    async def _feed(self) -> None:
        await self._installed.wait()
        while not self._draining.is_set():
            self._freed.clear()
            room = self._filling.room(self.in_flight, self._groups.sampled)
            if not room:
                await self._freed.wait()
                continue
            batch = await self._source.next(room)
            if batch is not None:
                self._start(batch)

    def _start(self, batch: Batch) -> None:
        if self._tasks is None or self._draining.is_set():
            self._ledger.give_up(batch.deadlines)
            return
        for item in batch.items:
            opened = self._groups.admit(item, batch.deadlines[item.id])
            if opened is not None:
                opened.task = self._tasks.create_task(self._unless_fault(self._work_on(opened)))
        self._level()

    async def _work_on(self, opened: Open) -> None:
        """One group from its lease to the queue of what is to be handed in."""
        try:
            await self._prepare(opened)
            await self._sample(opened)
            group = opened.group(self._engine.quantisation)
            if not group.whole:
                return
            scored = await self._delivery.score([group])
        except (WorkerFault, Gone, Unauthorized):
            raise
        except (EchoError, RuntimeError) as error:
            await self._failed(opened, error)
            return
        finally:
            self._level()
            self._freed.set()
        self._groups.finish(opened, scored)
        self._scored(len(scored))

    def _scored(self, groups: int) -> None:
        """So many were scored of one. Raises WorkerFault when it is one failure too many."""
        self._unscored = 0 if groups else self._unscored + 1
        if self._unscored >= UNSCORED:
            self._unscored = 0
            self._ledger.fault("unscored_batch", f"{UNSCORED} groups in a row could not be scored")

    async def _prepare(self, opened: Open) -> None:
        loop = asyncio.get_running_loop()
        [prompt], [ids] = await loop.run_in_executor(self._text_pool, self._text.encode, [opened.item])
        opened.prompt, opened.prompt_ids = prompt, ids
        begun = await self._partials.taken_up(opened.item, ids)
        if begun:
            opened.take_up(begun)

    async def _sample(self, opened: Open) -> None:
        """All samples that are missing."""
        sampling = sampling_of(opened.item, self._sampling)
        answer = self._text.answer(opened.told, sampling.max_tokens) if self._text.multi_turn else None
        await self._sampler.side_by_side(
            [
                Ask(opened.item, opened.prompt_ids, index, sampling, answer, opened.keep, opened.samples[index])
                for index in opened.missing
            ],
            self._finished,
        )

    def _finished(self, ask: Ask, sample: Completion) -> None:
        tokens = written([sample]) - written([ask.begun])
        self.meter.finished(self._clock(), tokens, own_share(ask.begun, sample))
        self._freed.set()

    async def _failed(self, opened: Open, error: EchoError | RuntimeError) -> None:
        """A group that can't be sampled: reported, counted, given up."""
        by_task = isinstance(error, TaskFailed)
        self._groups.drop(opened, "task_error" if by_task else "engine_died")
        detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
        report = Report(
            kind="engine_error", subject="generate", detail=detail[:1000], work_items=[opened.item.id]
        )  # fmt: skip
        if by_task:
            self._ledger.errors["task_error"] += 1
            report = Report(kind="task_error", subject=opened.item.id, detail=detail[:1000])
        await report_softly(self._client, report)
        if by_task:
            self._scored(0)
        else:
            self._ledger.fault("engine_error", detail)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            await self.look()

    async def look(self) -> None:
        """Follow the engine's figures, and let go of groups that nobody wants any more."""
        self._groups.drop_stale(self._oldest_admissible())
        try:
            load = await self._engine.load_figures()
        except EchoError as error:
            log.debug("no figures from the engine: %s", error.detail)
            return
        self._filling.follow(load, self.in_flight)
        self._level()
        self._freed.set()

    def _level(self) -> None:
        self.meter.level(self._clock(), self.in_flight, self.target)

    async def _wind_down(self) -> None:
        """Finish what ends in time, cut the rest, and hand over what there is of it."""
        loop = asyncio.get_running_loop()
        await self._source.close()
        while (working := self._groups.working) and (left := self._drain_by - loop.time()) > 0:
            self._hurry.clear()
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait({*working, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        if working:
            await self._cut(working)
        await self._groups.hand_over()

    async def _cut(self, working: set[asyncio.Task[None]]) -> None:
        await self._sampler.cut(self._cut_s)
        await end_within(working, self._cut_s)
