"""From a sampled batch to an accepted file: score, put, commit.

Invariant: finished work outlives an outage of the control service: it is handed in again and again until it is
answered or its lease is hopelessly over. Refused work is counted and never sent twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from app.protocol.errors import BadInput, EchoError, Gone, Refused, Unauthorized, Unavailable
from app.protocol.node import CommitAnswer, Report
from app.rollout_agent.batch import Batch, Sampled, TextSide, TrajectoryFile, score, to_file
from app.rollout_agent.client import NodeClient, backoff
from app.rollout_agent.ledger import WorkLedger

log = logging.getLogger(__name__)

HOPELESS_AFTER_S = 60.0
"""Finished work is kept for so long after its lease: nobody else may have answered it meanwhile."""
UPLOAD_MARGIN = 0.8
"""Batches aim at this share of the largest upload."""


class Delivery:
    """Hands batches in, one after the other. Raises WorkerFault, Gone, Unauthorized: the node is over."""

    def __init__(
        self,
        client: NodeClient,
        text: TextSide,
        ledger: WorkLedger,
        pool: Executor,
        *,
        max_upload_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._text = text
        self._ledger = ledger
        self._pool = pool
        self._max_bytes = max_upload_bytes
        self._bytes_per_item = 0.0
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter

    def items_that_fit(self) -> int | None:
        """How many items a file may hold, by the size of the last one; None before the first."""
        if not self._bytes_per_item:
            return None
        return max(1, int(UPLOAD_MARGIN * self._max_bytes / self._bytes_per_item))

    async def finish(self, sampled: Sampled) -> None:
        """Score, put and commit one batch."""
        rewards, failed = await score(self._text, sampled, self._pool)
        self._ledger.give_up(failed)
        for item, detail in failed.items():
            self._ledger.errors["task_error"] += 1
            log.warning("no reward for work item %s: %s", item, detail)
            report = Report(kind="task_error", subject=item, version=sampled.version, detail=detail[:1000])
            await report_softly(self._client, report)
        if not rewards:
            self._ledger.fault("unscored_batch", "not one group of a batch could be scored")
            return
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(self._pool, to_file, sampled, rewards)
        self._bytes_per_item = len(file.data) / len(rewards)
        if len(file.data) > self._max_bytes:
            self._ledger.give_up(rewards)
            self._ledger.fault("too_large", f"a file of {len(file.data)} bytes; at most {self._max_bytes} are taken")
            return
        await self._hand_in(file, sampled.batch)

    async def _hand_in(self, file: TrajectoryFile, batch: Batch) -> None:
        items = file.request.work_items
        attempt = 0
        while True:
            try:
                answer = await self._put_and_commit(file, batch)
            except (Gone, Unauthorized):
                raise
            except Unavailable as error:
                if self._clock() > batch.last_deadline + HOPELESS_AFTER_S:
                    self._ledger.settled(items)
                    self._ledger.errors["work_lost"] += len(items)
                    log.warning("%d finished work items are lost: %s", len(items), error.detail)
                    return
                await self._sleep(backoff(attempt, self._jitter()))
                attempt += 1
            except EchoError as error:
                self._ledger.settled(items)
                reason = f"{error.reason}: " if isinstance(error, Refused) else ""
                self._ledger.fault("refused", reason + error.detail)
                return
            else:
                self._ledger.settled(items)
                self._ledger.accepted(len(answer.late))
                return

    async def _put_and_commit(self, file: TrajectoryFile, batch: Batch) -> CommitAnswer:
        try:
            await self._client.put(batch.slot, file.data)
        except Unavailable:
            raise
        except EchoError as error:
            # The store's answer says nothing about this node's standing with the control service.
            raise BadInput(f"the object store refused the upload: {error.detail}") from error
        return await self._client.commit(file.request)


async def report_softly(client: NodeClient, report: Report) -> None:
    """Report a fault as well as possible; one that is not taken is only logged. Raises Gone, Unauthorized."""
    try:
        await client.report(report)
    except (Gone, Unauthorized):
        raise
    except EchoError as error:
        log.warning("a report of %s was not taken: %s", report.kind, error.detail)
