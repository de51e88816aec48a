"""From sampled groups to an accepted file: score, put, commit.

Invariant: finished work outlives an outage of the control service: it is handed in again and again until it is
answered or its lease is hopelessly over. Refused work is counted and never sent twice. Tokens that come to nothing are
counted by reason.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from app.protocol.errors import BadInput, Conflict, EchoError, Gone, Refused, Unauthorized, Unavailable
from app.protocol.node import Report, WasteReason
from app.protocol.pruning import Prune
from app.protocol.work import CommitAnswer, UploadSlot
from app.rollout_agent.client import NodeClient
from app.rollout_agent.files import TrajectoryFile, to_file
from app.rollout_agent.groups import Group, Sampled
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.reach import backoff
from app.rollout_agent.text_side import TextSide, score

log = logging.getLogger(__name__)

HOPELESS_AFTER_S = 60.0
"""Finished work is kept for so long after its lease: nobody else may have answered it meanwhile."""
UPLOAD_MARGIN = 0.8
"""Batches aim at this share of the largest upload."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A whole group with its rewards, in sample order."""

    group: Group
    rewards: Sequence[float]


class Delivery:
    """Hands groups in, one file after the other. Raises WorkerFault, Gone, Unauthorized: the node is over."""

    def __init__(
        self,
        client: NodeClient,
        text: TextSide,
        ledger: WorkLedger,
        pool: Executor,
        *,
        max_upload_bytes: int,
        prune: Prune | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._text = text
        self._ledger = ledger
        self._pool = pool
        self._max_bytes = max_upload_bytes
        self._prune = prune
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
        """Score, put and commit what is whole of one batch."""
        scored = await self.score(sampled.whole)
        if scored:
            await self.hand_in(scored, sampled.batch.slot)
        elif sampled.whole:
            self._ledger.fault("unscored_batch", "not one group of a batch could be scored")

    async def score(self, groups: Sequence[Group]) -> list[Scored]:
        """Those of these whole groups that could be scored; the others are reported and given up."""
        rewards, failed = await score(self._text, groups, self._pool)
        for group in groups:
            if group.item.id not in failed:
                continue
            detail = failed[group.item.id]
            log.warning("no reward for work item %s: %s", group.item.id, detail)
            report = Report(
                kind="task_error", subject=group.item.id, version=group.oldest_version, detail=detail[:1000]
            )
            await report_softly(self._client, report)
            # Only now: until then it is open, and whoever lets go of it counts it.
            self._ledger.give_up([group.item.id])
            self._ledger.errors["task_error"] += 1
            self._ledger.waste("task_error", group.own_tokens)
        return [Scored(group, rewards[group.item.id]) for group in groups if group.item.id in rewards]

    async def hand_in(self, scored: Sequence[Scored], slot: UploadSlot | None = None) -> None:
        """Make a file of these groups, at least one, put and commit it; several, if one would be too large. Without a
        slot one is asked for."""
        groups = [s.group for s in scored]
        rewards = {s.group.item.id: s.rewards for s in scored}
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(
            self._pool, to_file, groups, rewards, slot.key if slot is not None else "", self._prune
        )
        self._bytes_per_item = len(file.data) / len(groups)
        if len(file.data) > self._max_bytes and len(scored) > 1:
            half = len(scored) // 2
            await self.hand_in(scored[:half], slot)
            await self.hand_in(scored[half:])
            return
        if len(file.data) > self._max_bytes:
            self._ledger.give_up(rewards)
            self._waste("refused", groups)
            self._ledger.fault("too_large", f"a file of {len(file.data)} bytes; at most {self._max_bytes} are taken")
            return
        await self._insist(file, groups, slot)

    async def _insist(self, file: TrajectoryFile, groups: Sequence[Group], slot: UploadSlot | None) -> None:
        items, deadline = file.request.work_items, max(group.deadline for group in groups)
        oldest = min(group.oldest_version or 0 for group in groups)
        attempt = 0
        while True:
            try:
                if slot is None:
                    slot = await self._client.upload_slot(oldest)
                    file = file.under(slot.key)
                answer = await self._put_and_commit(file, slot)
            except (Gone, Unauthorized):
                raise
            except (Unavailable, Conflict) as error:
                # Conflict: an earlier try of the file is still being looked at, or its version is news to the service.
                deadline = max(deadline, self._ledger.deadline(items) or deadline)
                if self._clock() > deadline + HOPELESS_AFTER_S:
                    self._ledger.settled(items)
                    self._ledger.errors["work_lost"] += len(items)
                    self._ledger.waste("refused", sum(group.own_tokens for group in groups))
                    log.warning("%d finished work items are lost: %s", len(items), error.detail)
                    return
                await self._sleep(backoff(attempt, self._jitter()))
                attempt += 1
            except EchoError as error:
                self._ledger.settled(items)
                self._waste("refused", groups)
                reason = f"{error.reason}: " if isinstance(error, Refused) else ""
                self._ledger.fault("refused", reason + error.detail)
                return
            else:
                self._ledger.settled(items)
                self._ledger.accepted(len(answer.late))
                self._waste("stale", [group for group in groups if group.item.id in answer.late])
                return

    async def _put_and_commit(self, file: TrajectoryFile, slot: UploadSlot) -> CommitAnswer:
        await put_softly(self._client, slot, file.data)
        return await self._client.commit(file.request)

    def _waste(self, reason: WasteReason, groups: Sequence[Group]) -> None:
        self._ledger.waste(reason, sum(group.tokens for group in groups))


async def put_softly(client: NodeClient, slot: UploadSlot, data: bytes) -> None:
    """Put a file. Raises Unavailable, and BadInput for every other answer of the store: it says nothing about this
    node's standing with the control service."""
    try:
        await client.put(slot, data)
    except Unavailable:
        raise
    except EchoError as error:
        raise BadInput(f"the object store refused the upload: {error.detail}") from error


async def report_softly(client: NodeClient, report: Report) -> None:
    """Report a fault as well as possible; one that is not taken is only logged. Raises Gone, Unauthorized."""
    try:
        await client.report(report)
    except (Gone, Unauthorized):
        raise
    except EchoError as error:
        log.warning("a report of %s was not taken: %s", report.kind, error.detail)
