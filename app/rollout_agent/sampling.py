"""One sample of a group, from its prompt to its end, whatever happens to the engine meanwhile.

Invariant: a sample goes on from the last token that is known of it: under the next version after a cut, with the engine
loaded again after a death. While the engine has no version nothing is sampled. After `stop` a sample that is cut stays
cut. Tokens that were sampled and are not kept are counted once, by `lose`, however a sample came to its end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from app.protocol.errors import EchoError, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import WasteReason
from app.protocol.work import WorkItem
from app.rollout_agent.engines.base import Completion, EngineDied, StreamEngine
from app.rollout_agent.episodes import Answer, play
from app.rollout_agent.groups import CUT
from app.rollout_agent.joining import join, sample_seed, spanned
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.reach import backoff

log = logging.getLogger(__name__)

TRIES = 6
"""So often in a row without a token, and a sample is given up."""
NOTHING = Completion([], [], "abort")
ENVIRONMENTS = 4
"""Replies of environments side by side, of a task that says nothing about it."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A piece that the engine was asked for; monotonic seconds."""

    item: str
    since: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be sampled: sample `index` of `item`, from `begun` on.

    `answer` is the environment of a multi-turn task, None for one with one turn; `keep` is told, by index, what is
    known of the sample, as it grows.
    """

    item: WorkItem
    prompt_ids: Sequence[int]
    index: int
    sampling: SamplingSpec
    answer: Answer | None
    keep: Callable[[int, Completion], None]
    begun: Completion | None = None


class Sampler:
    """Samples with one engine. `revive` gives an engine that has lost its version the last one back, or raises.

    `environments`: replies that are asked for side by side, of a multi-turn task. They have threads of their own: the
    shared ones read and check versions, the rewards' have to be free for a reward's time to count from its beginning.
    """

    def __init__(
        self,
        engine: StreamEngine,
        revive: Callable[[], Awaitable[None]],
        ledger: WorkLedger,
        *,
        environments: int = ENVIRONMENTS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._engine = engine
        self._revive = revive
        self._ledger = ledger
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._stopping = False
        self._environments = ThreadPoolExecutor(environments, "environment")
        self._running: dict[object, _Running] = {}
        self._gone: Counter[str] = Counter()
        """Tokens that went with pieces that were cancelled, by item, as far as nobody has counted them."""
        self._loose: Counter[tuple[str, int]] = Counter()
        """Tokens that came and are not kept yet, by item and index."""
        self._tokens_per_s: float | None = None
        """Of one sample, smoothed."""
        self._last_result_at = clock()
        """When a piece came last, or the first one after a pause was asked for."""

    async def cut(self, within_s: float) -> None:
        """Cut all that runs; what is cut from now on stays cut."""
        self._stopping = True
        try:
            async with asyncio.timeout(within_s):
                await self._engine.abort()
        except (EchoError, TimeoutError) as error:
            log.warning("the engine does not cut its samples: %s", getattr(error, "detail", "timeout"))

    def close(self) -> None:
        """Ask no environment any more. Threads that hang in one are not waited for."""
        self._environments.shutdown(wait=False, cancel_futures=True)

    async def side_by_side(self, asks: Sequence[Ask], finished: Callable[[Ask, Completion], None]) -> None:
        """All of these samples, each told as it comes. The first error ends the others. Raises as `one_sample`."""

        async def one(ask: Ask) -> None:
            finished(ask, await self.one_sample(ask))

        try:
            async with asyncio.TaskGroup() as samples:
                for ask in asks:
                    samples.create_task(one(ask))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def one_sample(self, ask: Ask) -> Completion:
        """The whole sample; or what there is of it, as `abort`, after `stop`. A multi-turn task is played through.

        Raises BadInput (the engine can't take it), Unavailable (it gives nothing, again and again), what `revive` and
        the task raise.
        """

        async def turn(ids: Sequence[int], start: int, max_tokens: int) -> Completion:
            return await self._turn(ask, ids, start, max_tokens)

        if ask.answer is not None:
            most = ask.sampling.max_tokens
            sample = await play(turn, ask.answer, self._environments, ask.prompt_ids, most, ask.begun)
        else:
            begun = [] if ask.begun is None else ask.begun.token_ids
            rest = await turn([*ask.prompt_ids, *begun], len(begun), ask.sampling.max_tokens - len(begun))
            sample = join(ask.begun, rest)
        self._keep(ask, sample)
        return sample

    def _keep(self, ask: Ask, sample: Completion) -> None:
        """All that is known of a sample is in safety."""
        self._loose.pop((ask.item.id, ask.index), None)
        ask.keep(ask.index, sample)

    async def _turn(self, ask: Ask, ids: Sequence[int], start: int, max_tokens: int) -> Completion:
        """From `ids` on to an end of the policy's own, in as many pieces as it takes."""
        got, barren = NOTHING, 0
        begun = ask.begun if ask.begun is not None and start == len(ask.begun.token_ids) else None
        while got.finish_reason == CUT and not self._stopping:
            at = len(got.token_ids)
            seed = sample_seed(ask.item.seed, ask.index, start + at)
            piece = await self._piece(ask, [*ids, *got.token_ids], seed, max_tokens - at)
            barren = 0 if piece.token_ids else barren + 1
            if barren >= TRIES:
                raise Unavailable(f"the engine has cut a sample {TRIES} times without a token")
            if barren:
                await self._sleep(backoff(barren - 1, self._jitter()))
            got = join(got, piece)
            # A turn that has ended is no episode that has: what follows may change the reward.
            if (begun is not None or start == 0) and (ask.answer is None or got.finish_reason == CUT):
                self._keep(ask, join(begun, got))
        return got

    async def _piece(self, ask: Ask, ids: Sequence[int], seed: int, max_tokens: int) -> Completion:
        """One answer of the engine, with its spans; nothing, if the engine died of it or could not take it now."""
        version = self._engine.version
        if version is None:
            await self._revive()
            version = self._engine.version
        if version is None:
            return NOTHING
        if not self._running:
            self._last_result_at = self._clock()
        ticket, running = object(), _Running(ask.item.id, self._clock(), max_tokens)
        self._running[ticket] = running
        temperature = ask.sampling.temperature
        try:
            piece = await self._engine.sample(ids, seed=seed, max_tokens=max_tokens, temperature=temperature)
        except Unavailable as error:
            if isinstance(error, EngineDied) and ticket in self._running:
                lost = error.tokens or self._guess(running)
                self._ledger.sampled(lost)
                self._ledger.waste("engine_died", lost)
            log.debug("a sample has to go on later: %s", error.detail)
            return NOTHING
        except asyncio.CancelledError:
            if ticket in self._running:
                self._gone[ask.item.id] += self._guess(running)
            raise
        finally:
            given_up = self._running.pop(ticket, None) is None
        if not given_up:
            self._loose[ask.item.id, ask.index] += len(piece.token_ids)
            self._came(len(piece.token_ids), running)
        return spanned(piece, version)

    def _came(self, tokens: int, running: _Running) -> None:
        self._ledger.sampled(tokens)
        self._last_result_at = self._clock()
        seconds = self._last_result_at - running.since
        if seconds > 0:
            speed, before = tokens / seconds, self._tokens_per_s
            self._tokens_per_s = speed if before is None else 0.9 * before + 0.1 * speed

    def _guess(self, running: _Running) -> int:
        """How many tokens a piece has that will never come, by the speed of others."""
        return min(running.max_tokens, int((self._tokens_per_s or 0.0) * (self._clock() - running.since)))

    def lose(self, item: str, reason: WasteReason) -> None:
        """Count what goes with an item that is given up, besides what is kept of it: what has come since, and, by the
        speed of others, what its pieces had that will never come."""
        tickets = [ticket for ticket, running in self._running.items() if running.item == item]
        unseen = self._gone.pop(item, 0) + sum(self._guess(self._running.pop(ticket)) for ticket in tickets)
        loose = sum(self._loose.pop(key) for key in [key for key in self._loose if key[0] == item])
        self._ledger.sampled(unseen)
        self._ledger.waste(reason, unseen + loose)

    @property
    def in_flight(self) -> int:
        """Pieces that the engine has been asked for."""
        return len(self._running)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last result while something is being sampled; 0 while nothing is."""
        return self._clock() - self._last_result_at if self._running else 0.0
