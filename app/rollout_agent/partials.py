"""Groups that change hands: what another node has begun is taken up, what this one can't finish is handed over.

Invariant: nothing of another node's file is used before its size, hash, schema and prompt were found to be right; what
is not used is counted, and the group is sampled from scratch. What is handed over is no longer this node's once the
control service has said so, and wasted until then. What nobody took over is given back at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from blake3 import blake3

from app.protocol import partial, trajectory
from app.protocol.errors import Conflict, EchoError, Gone, IntegrityError, Refused, Unauthorized
from app.protocol.node import Report
from app.protocol.proofs import Proofs
from app.protocol.trajectory import Rollout
from app.protocol.work import PartialAnswer, PartialRef, WorkItem
from app.rollout_agent.client import NodeClient
from app.rollout_agent.delivery import put_softly, report_softly
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.files import TrajectoryFile, file_of, rows_of
from app.rollout_agent.groups import Begun, Group
from app.rollout_agent.ledger import WorkLedger

log = logging.getLogger(__name__)

CONFLICTS_TOLERATED = 2
"""Of one file, a second apart: who hands over has little time."""
ANY_VERSION = 2**31 - 1
"""That no version is from the future the control service has seen to; it knows more of them than this node."""
REASONS: Mapping[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


class Partials:
    """Takes up and hands over. `quantisation`: of the weights in force; `oldest_admissible`: see Directives;
    `vocabulary`: tokens that the model knows, None: any."""

    def __init__(
        self,
        client: NodeClient,
        ledger: WorkLedger,
        *,
        max_tokens: int,
        max_upload_bytes: int,
        quantisation: Callable[[], str | None],
        oldest_admissible: Callable[[], int | None],
        vocabulary: Callable[[], int | None] = lambda: None,
        proofs: Proofs = "none",
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._max_tokens = max_tokens
        self._max_bytes = max_upload_bytes
        self._quantisation = quantisation
        self._oldest_admissible = oldest_admissible
        self._vocabulary = vocabulary
        self._fetching = asyncio.Lock()
        self._coming: dict[tuple[str, str], asyncio.Task[bytes]] = {}
        """Files that are asked for, by their keys and hashes."""
        self._last: tuple[tuple[str, str], bytes] | None = None
        """The file that was fetched last."""
        self._proofs = proofs

    async def begun(self, items: Sequence[WorkItem], prompt_ids: Sequence[Sequence[int]]) -> dict[str, Begun]:
        """By item id, what other nodes have sampled of these items. Raises Gone, Unauthorized."""
        found = await asyncio.gather(*(self.taken_up(i, ids) for i, ids in zip(items, prompt_ids, strict=True)))
        return {item.id: samples for item, samples in zip(items, found, strict=True) if samples}

    async def taken_up(self, item: WorkItem, prompt_ids: Sequence[int]) -> Begun:
        """What another node has sampled of an item; empty when there is nothing, or nothing that can be used."""
        if item.partial is None:
            return ()
        try:
            data = await self._fetch(item.partial)
            rows = await asyncio.to_thread(self._read, data, item)
        except EchoError as error:
            self._refused(item, error.detail, 0)
            return ()
        tokens = sum(row.own_tokens for row in rows)
        if any(list(row.prompt_ids) != list(prompt_ids) for row in rows):
            self._refused(item, "its prompt is not that of this item", tokens)
            return ()
        floor = self._oldest_admissible()
        if floor is not None and min(row.oldest_version for row in rows) < floor:
            log.info("what was begun of work item %s is too old to go on with", item.id)
            self._ledger.waste("stale", tokens)
            return ()
        return samples_of(rows, item.group_size)

    async def hand_over(self, groups: Sequence[Group]) -> None:
        """Hand over what there is of unfinished groups; items that nobody took stay to be handed back without it.

        What this node has added nothing to is only given back: the store still has what others began. Raises Gone,
        Unauthorized.
        """
        for group in groups:
            self._ledger.give_up([group.item.id])
        # Held-out prompts are not passed on: docs/nodes.md says why.
        able = [group for group in groups if group.own_tokens > 0 and group.item.split == "train"]
        taken: set[str] = set()
        try:
            # To encode thousands of completions takes a while, in which heartbeats go on.
            for part in await asyncio.to_thread(self._parts, able):
                taken |= await self._hand_over(part)
        finally:
            lost = sum(group.own_tokens for group in groups if group.item.id not in taken)
            self._ledger.waste("interrupted", lost)
            if taken:
                log.info("%d unfinished work items are handed over", len(taken))
        await self.hand_back([group.item.id for group in groups if group.item.id not in taken])

    async def hand_back(self, items: Sequence[str]) -> None:
        """Others are to begin these anew, and need not wait until this node has left. Raises Gone, Unauthorized."""
        if items:
            detail = f"{len(items)} work items will not be finished here"
            await report_softly(self._client, Report(kind="handed_back", detail=detail, work_items=list(items)))

    async def _hand_over(self, groups: Sequence[Group]) -> set[str]:
        """One file. Returns the items that were taken; none when it failed."""
        items = [group.item.id for group in groups]
        try:
            slot = await self._client.upload_slot(min(group.oldest_version or 0 for group in groups))
            file = file_of(await asyncio.to_thread(encoded, groups), slot.key, items)
            await put_softly(self._client, slot, file.data)
            answer = await self._commit(file)
        except (Gone, Unauthorized):
            raise
        except EchoError as error:
            self._ledger.errors["hand_over_failed"] += 1
            if isinstance(error, Refused):
                # Then the store forgets what these groups had from others, too.
                self._ledger.waste("interrupted", sum(group.foreign_tokens for group in groups))
            log.warning("unfinished work could not be handed over: %s", error.detail)
            return set()
        taken = set(answer.taken) & set(items)
        self._ledger.passed_on(taken)
        return taken

    async def _commit(self, file: TrajectoryFile) -> PartialAnswer:
        """Raises Conflict when it is one at the last of some tries: a version may not be known to the service yet."""
        for _ in range(CONFLICTS_TOLERATED):
            try:
                return await self._client.partials(file.request)
            except Conflict:
                await self._client.pause(1.0)
        return await self._client.partials(file.request)

    def _parts(self, groups: Sequence[Group]) -> list[Sequence[Group]]:
        """Groups in files that are small enough; one group alone is tried in any case."""
        if not groups:
            return []
        if len(groups) == 1 or len(encoded(groups)) <= self._max_bytes:
            return [groups]
        middle = len(groups) // 2
        return [*self._parts(groups[:middle]), *self._parts(groups[middle:])]

    async def _fetch(self, reference: PartialRef) -> bytes:
        """A file. One node's groups are in few files and come together, those of several nodes in turn: each file is
        fetched once for all who ask for it meanwhile, and if it doesn't come, it doesn't for any of them."""
        if reference.size > self._max_bytes:
            raise Refused("too_large", f"it has {reference.size} bytes; at most {self._max_bytes} are read")
        name = reference.key, reference.blake3
        coming = self._coming.get(name)
        if coming is None:
            coming = self._coming[name] = asyncio.create_task(self._download(name, reference))
            coming.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait any more
        return await asyncio.shield(coming)

    async def _download(self, name: tuple[str, str], reference: PartialRef) -> bytes:
        """The file, one at a time."""
        try:
            async with self._fetching:
                if self._last is not None and self._last[0] == name:
                    return self._last[1]
                self._last = None
                data = await self._client.download(reference.url, reference.size)
                if len(data) != reference.size or blake3(data).hexdigest() != reference.blake3:
                    raise IntegrityError("what the store has is not what was handed over")
                self._last = name, data
                return data
        finally:
            del self._coming[name]

    def _read(self, data: bytes, item: WorkItem) -> list[Rollout]:
        rows = partial.group_of(
            data,
            item.id,
            trajectory.Expected(item.prompt_index, item.group_size),
            newest_version=ANY_VERSION,
            max_tokens=self._max_tokens,
            quantised=self._quantisation(),
            proofs=self._proofs,
        )
        known = self._vocabulary()
        if known is not None and max(max(row.completion_ids) for row in rows) >= known:
            # An engine that is fed such a token may die of it.
            raise Refused("lengths", f"it has a token outside the model's vocabulary of {known}")
        return rows

    def _refused(self, item: WorkItem, detail: str, tokens: int) -> None:
        self._ledger.errors["partial_refused"] += 1
        self._ledger.waste("partial_refused", tokens)
        log.warning("what another node has begun of work item %s can't be used: %s", item.id, detail)


def encoded(groups: Sequence[Group]) -> bytes:
    """The samples that there are of some groups, as a partial file."""
    return partial.encode_partial([row for group in groups for row in rows_of(group, [0.0] * group.item.group_size)])


def samples_of(rows: Sequence[Rollout], group_size: int) -> list[Completion | None]:
    """The rows of one item as samples in order; None: there is no row of it."""
    samples: list[Completion | None] = [None] * group_size
    for row in rows:
        spans = [Span(v, s) for v, s in zip(row.span_versions, row.span_starts, strict=True)]
        samples[row.sample_index] = Completion(
            list(row.completion_ids), list(row.logprobs), REASONS[row.finish_reason], spans, row.generated, row.proofs
        )
    return samples
