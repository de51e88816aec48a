"""Groups that a node had begun and somebody else will finish.

Invariant: a partial belongs to exactly the work items whose rows name its key; it was whole, well-formed and
admissible when it was taken, and its object goes when the last of these items is done. Who wrote the beginning of a
group stays on record as long as that beginning is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from sqlalchemy import delete, select

from app.fleet import uploads
from app.fleet.core import Core
from app.fleet.sizes import size_of
from app.protocol import partial, trajectory
from app.protocol.errors import NotFound, Refused, TooLarge
from app.protocol.job import FINAL_STATUSES, JobSpec
from app.protocol.work import CommitRequest, PartialRef
from app.storage.models import GroupPrint, ItemStatus, Job, Trajectory, WorkItem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """Of one group in a partial file: the oldest version, and how many tokens the policy wrote."""

    version: int
    tokens: int


def begun(table: pa.Table) -> dict[str, Begun]:
    """What a checked partial table has of each work item."""
    found: dict[str, Begun] = {}
    for rollout in trajectory.rollouts(table):
        had = found.get(rollout.work_item, Begun(rollout.oldest_version, 0))
        found[rollout.work_item] = Begun(min(had.version, rollout.oldest_version), had.tokens + rollout.own_tokens)
    return found


def read(data: bytes, expected: Mapping[str, trajectory.Expected], newest: int, spec: JobSpec) -> pa.Table:
    """Open and check a partial file. Raises Refused."""
    table = trajectory.read_table(data, max_rows=sum(e.group_size for e in expected.values()))
    partial.validate(
        table, expected,
        newest_version=newest, max_tokens=spec.sampling.max_tokens, quantised=spec.snapshot.quantise,
        proofs=spec.trust.proofs,
    )  # fmt: skip
    return table


def continued(before: pa.Table, after: pa.Table, item: str) -> bool:
    """Whether a finished group, or a longer beginning of it, goes on from an earlier beginning: every sample that was
    begun is still there with the tokens and log-probs that it began with. Samples that were left out don't count."""
    old, new = _samples(before, item), _samples(after, item)
    both = old.keys() & new.keys()
    return bool(both) and all(
        list(new[i].completion_ids[: len(old[i].completion_ids)]) == list(old[i].completion_ids)
        and list(new[i].logprobs[: len(old[i].logprobs)]) == list(old[i].logprobs)
        for i in both
    )


def _samples(table: pa.Table, item: str) -> dict[int, trajectory.Rollout]:
    own = table.filter(pc.equal(table.column("work_item"), item))
    return {r.sample_index: r for r in trajectory.rollouts(own)}


def not_continued(core: Core, items: Iterable[WorkItem], after: pa.Table) -> set[str]:
    """Those of the begun items that were sampled from scratch after all. Blocks.

    Who put a file can put another one in its place: one that is not what was taken over proves nothing.
    """
    scratch: set[str] = set()
    tables: dict[str, pa.Table | None] = {}
    for item in items:
        if item.partial_key is None:
            continue
        if item.partial_key not in tables:
            tables[item.partial_key] = _taken_over(core, item.partial_key, item)
        before = tables[item.partial_key]
        if before is not None and not continued(before, after, item.id):
            scratch.add(item.id)
    return scratch


def _taken_over(core: Core, key: str, item: WorkItem) -> pa.Table | None:
    """A partial file as it was when it was taken over; None if it is not there any more. Blocks."""
    try:
        # Whoever put it can put anything of any size in its place: that is not read.
        data = core.objects.get(key, item.partial_size)
    except (NotFound, TooLarge):
        data = b""
    if blake3(data).hexdigest() != item.partial_blake3:
        log.warning("the partial %s is not what was taken over", key)
        return None
    return trajectory.read_table(data)


def attach(item: WorkItem, request: CommitRequest, node_id: str, found: Begun) -> None:
    """Note a beginning on its item, which is pending again."""
    item.partial_key, item.partial_size, item.partial_blake3 = request.key, request.size, request.blake3
    item.partial_version, item.partial_tokens, item.partial_node = found.version, found.tokens, node_id
    if node_id not in item.written_by:
        item.written_by = [*item.written_by, node_id]
    item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None


def forget(item: WorkItem, *, unused: bool = False) -> str | None:
    """The item has no beginning to go on from any more. Returns the key of the object, if there was one.

    `unused`: nor has its group; nobody but the node that finishes it writes any of it.
    """
    key = item.partial_key
    item.partial_key = item.partial_size = item.partial_blake3 = None
    item.partial_version = item.partial_tokens = None
    if unused:
        item.partial_node, item.written_by = None, []
    return key


def ref(core: Core, item: WorkItem) -> PartialRef | None:
    """What a node is told of a beginning."""
    if item.partial_key is None or item.partial_size is None or item.partial_blake3 is None:
        return None
    url = core.objects.presign_get(item.partial_key, uploads.EXPIRES_S)
    return PartialRef(key=item.partial_key, url=url, size=item.partial_size, blake3=item.partial_blake3)


def expected(job: Job, items: Iterable[WorkItem], wanted: Iterable[str]) -> dict[str, trajectory.Expected]:
    """What a partial file may hold. Raises Refused for an item that the job does not have."""
    found = {item.id: trajectory.Expected(item.prompt_index, size_of(job, item)) for item in items}
    for name in wanted:
        if name not in found:
            raise Refused("foreign_work_item", f"work item {name} is not leased to this node")
    return found


async def release(core: Core, keys: Iterable[str | None]) -> None:
    """Remove objects that no work item goes on from and no trajectory is. Not inside a transaction."""
    wanted = {key for key in keys if key is not None}
    if not wanted:
        return
    async with core.db.read() as session:
        kept = set(await session.scalars(select(WorkItem.partial_key).where(WorkItem.partial_key.in_(wanted))))
        kept |= set(await session.scalars(select(Trajectory.key).where(Trajectory.key.in_(wanted))))
    await uploads.remove(core, sorted(wanted - kept))


async def collect(core: Core) -> None:
    """Remove what jobs that are over leave behind: beginnings of groups, and the fingerprints of their groups."""
    over = select(Job.id).where(Job.status.in_(list(FINAL_STATUSES)))
    async with core.db.write() as session:
        query = select(WorkItem).where(WorkItem.partial_key.is_not(None), WorkItem.job_id.in_(over))
        keys = [forget(item) for item in await session.scalars(query)]
        await session.execute(delete(GroupPrint).where(GroupPrint.job_id.in_(over)))
    await release(core, keys)
