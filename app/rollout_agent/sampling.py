"""One sample of a group, from its prompt to its end, whatever happens to the engine meanwhile.

Invariant: a sample goes on from the last token that is known of it: under the next version after a cut, with the engine
loaded again after a death. While the engine has no version nothing is sampled. After `stop` a sample that is cut stays
cut.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.protocol.errors import Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import WorkItem
from app.rollout_agent.batch import CUT
from app.rollout_agent.client import backoff
from app.rollout_agent.engines.base import Completion, EngineDied, StreamEngine
from app.rollout_agent.episodes import Answer, play
from app.rollout_agent.joining import join, sample_seed, spanned
from app.rollout_agent.ledger import WorkLedger

log = logging.getLogger(__name__)

TRIES = 6
"""So often in a row without a token, and a sample is given up."""
NOTHING = Completion([], [], "abort")


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be sampled: sample `index` of `item`, from `begun` on.

    `keep` is told, by index, what is known of it, as it grows.
    """

    item: WorkItem
    prompt_ids: Sequence[int]
    index: int
    sampling: SamplingSpec
    answer: Answer
    keep: Callable[[int, Completion], None]
    begun: Completion | None = None


class Sampler:
    """Samples with one engine. `revive` gives an engine that has lost its version the last one back, or raises."""

    def __init__(
        self,
        engine: StreamEngine,
        revive: Callable[[], Awaitable[None]],
        ledger: WorkLedger,
        *,
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
        self.in_flight = 0
        """Pieces that the engine has been asked for."""
        self.last_result_at = clock()
        """When a piece came last, or the first one after a pause was asked for."""

    def stop(self) -> None:
        """What is cut from now on stays cut."""
        self._stopping = True

    async def one_sample(self, ask: Ask) -> Completion:
        """The whole sample; or what there is of it, as `abort`, after `stop`. A multi-turn task is played through.

        Raises BadInput (the engine can't take it), Unavailable (it gives nothing, again and again), what `revive` and
        the task raise.
        """

        async def turn(ids: Sequence[int], start: int, max_tokens: int) -> Completion:
            return await self._turn(ask, ids, start, max_tokens)

        sample = await play(turn, ask.answer, ask.prompt_ids, ask.sampling.max_tokens, ask.begun)
        ask.keep(ask.index, sample)
        return sample

    async def _turn(self, ask: Ask, ids: Sequence[int], start: int, max_tokens: int) -> Completion:
        """From `ids` on to an end of the policy's own, in as many pieces as it takes."""
        got, barren = NOTHING, 0
        begun = ask.begun if ask.begun is not None and start == len(ask.begun.token_ids) else None
        while got.finish_reason == CUT and not self._stopping:
            at = len(got.token_ids)
            seed = sample_seed(ask.item.seed, ask.index, start + at)
            piece = await self._piece([*ids, *got.token_ids], seed, max_tokens - at, ask.sampling.temperature)
            barren = 0 if piece.token_ids else barren + 1
            if barren >= TRIES:
                raise Unavailable(f"the engine has cut a sample {TRIES} times without a token")
            if barren:
                await self._sleep(backoff(barren - 1, self._jitter()))
            got = join(got, piece)
            if begun is not None or start == 0:
                ask.keep(ask.index, join(begun, got))
        return got

    async def _piece(self, ids: Sequence[int], seed: int, max_tokens: int, temperature: float) -> Completion:
        """One answer of the engine, with its spans; nothing, if the engine died of it or could not take it now."""
        version = self._engine.version
        if version is None:
            await self._revive()
            version = self._engine.version
        if version is None:
            return NOTHING
        if not self.in_flight:
            self.last_result_at = self._clock()
        self.in_flight += 1
        try:
            piece = await self._engine.sample(ids, seed=seed, max_tokens=max_tokens, temperature=temperature)
        except Unavailable as error:
            lost = error.tokens if isinstance(error, EngineDied) else 0
            self._ledger.sampled(lost)
            self._ledger.waste("engine_died", lost)
            log.info("a sample has to go on later: %s", error.detail)
            return NOTHING
        finally:
            self.in_flight -= 1
        self.last_result_at = self._clock()
        self._ledger.sampled(len(piece.token_ids))
        return spanned(piece, version)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last result while something is being sampled; 0 while nothing is."""
        return self._clock() - self.last_result_at if self.in_flight else 0.0
