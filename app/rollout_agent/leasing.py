"""Asking for work.

Invariant: a request for work is never given up half-way, since its answer may have leased items; so when a newer
version is installed during a long poll, a further request is made beside it (a newer version may open work that the
older one can't have), and whatever either brings is worked on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from app.protocol.errors import Conflict, EchoError, Gone, Unauthorized, Unavailable
from app.protocol.work import WorkAnswer, WorkRequest
from app.rollout_agent.client import NodeClient
from app.rollout_agent.groups import Batch
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.reach import backoff

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""Long poll."""
MAX_REQUESTS = 8
"""Long polls at a time, each under another version."""
EMPTY_PAUSE_S = 0.1


class WorkSource:
    """Leases batches; `version` is the installed policy version."""

    def __init__(
        self,
        client: NodeClient,
        ledger: WorkLedger,
        version: Callable[[], int | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._version = version
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._misses = 0
        self._requests: dict[asyncio.Task[Batch | None], int] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """A version was installed, or nothing more is wanted: this or the next call of `next` returns soon."""
        self._wake.set()

    async def next(self, max_items: int) -> Batch | None:
        """The next batch; None when there was none this time, or after `wake`.

        Raises Gone, Unauthorized (the node is over), WorkerFault.
        """
        version = self._version()
        if version is None:
            raise Unavailable("work was to be leased without an installed version")
        if version not in self._requests.values() and len(self._requests) < MAX_REQUESTS:
            self._requests[asyncio.create_task(self._lease(version, max_items))] = version
        waking = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({*self._requests, waking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
        answered = next((task for task in self._requests if task.done()), None)
        if answered is None:
            self._wake.clear()
            return None
        del self._requests[answered]
        return answered.result()

    async def close(self) -> None:
        """Give up all requests: the node is about to leave, which hands everything back."""
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        self._requests.clear()

    async def _lease(self, version: int, max_items: int) -> Batch | None:
        """One request; None after a pause."""
        asked_at = self._clock()
        answer = await self._ask(WorkRequest(max_items=max_items, policy_version=version, wait_s=WAIT_S))
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

    async def _ask(self, request: WorkRequest) -> WorkAnswer | None:
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
