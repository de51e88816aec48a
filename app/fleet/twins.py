"""Twins: some prompts go out a second time, to another node, and the rewards of the two groups are held together.

Invariant: a twin is work like any other, trained on like any other, at no place of the seeded order; numbers that never
leave this process decide which groups get one, after they were given out. Nothing that a node is told differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from app.fleet import selection
from app.fleet.core import Core
from app.protocol.job import JobSpec
from app.storage.models import ItemStatus, Job, Node, Twin, WorkItem

PARTNERS = 6
"""With so many of its earlier partners at work a node gets no new ones: a few who say much are worth more than many who
say little, and those alike, for who says most is left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One group as it was handed in: the oldest and the newest version of its tokens, rewards by sample."""

    oldest: int
    newest: int
    rewards: tuple[float, ...]


def answers(table: pa.Table) -> dict[str, Answer]:
    """What each work item of a checked trajectory table was answered with."""
    spans: dict[str, set[int]] = {}
    rewards: dict[str, list[tuple[int, float]]] = {}
    columns = ("work_item", "sample_index", "span_versions", "reward")
    for item, sample, versions, reward in zip(*(table.column(c).to_pylist() for c in columns), strict=True):
        spans.setdefault(item, set()).update(versions)
        rewards.setdefault(item, []).append((sample, float(reward)))
    return {i: Answer(min(v), max(v), tuple(r for _, r in sorted(rewards[i]))) for i, v in spans.items()}


def place(ordinal: int) -> int:
    """The ordinal of the twin of the `ordinal`-th group."""
    return -1 - ordinal


def wanted(spec: JobSpec) -> bool:
    """Whether a job has twins: somebody asks for them, and nodes hand in rewards of all that they sampled."""
    return spec.trust.twin_share > 0 and spec.rewards != "learner" and spec.batch.prune is None


async def make(
    session: AsyncSession,
    job: Job,
    node: Node,
    leased: Sequence[WorkItem],
    at_work: Collection[str],
    *,
    named: Callable[[int], tuple[str, int]],
    draw: Callable[[], float],
) -> None:
    """Twins of some of the groups that a node was just given for the first time. `named`: ordinal → id and seed."""
    spec = JobSpec.model_validate(job.spec)
    others = set(at_work) - {node.id}
    if not others or not wanted(spec):
        return
    share = selection.share(spec.trust.twin_share, twins=node.twins, doubt=node.twin_doubt)
    fresh = [i for i in leased if i.ordinal >= 0 and i.attempts == 1 and i.partial_key is None and not i.written_by]
    # Looked up whether anything is drawn or not: how long an answer takes must not tell.
    known, meant = await _partners(session, job, node), await _meant(session, job)
    for item in [item for item in fresh if draw() < share]:
        name, seed = named(place(item.ordinal))
        session.add(
            WorkItem(
                id=name, job_id=job.id, ordinal=place(item.ordinal), prompt_index=item.prompt_index, seed=seed,
                status=ItemStatus.PENDING, attempts=0, group_size=item.group_size, written_by=[],
                leased_version=item.leased_version,
            )
        )  # fmt: skip
        session.add(
            Twin(
                second=name, first=item.id, job_id=job.id, rise=[], fall=[],
                wanted=partner(others, known, meant),
            )
        )  # fmt: skip


def partner(others: Collection[str], known: Counter[str], meant: set[str]) -> list[str]:
    """Who is to have a twin: of the nodes at work the one that a node was compared with least. `known` counts its
    comparisons; `meant` are those for whom one waits already: one that is slow has no second one. Empty: whoever
    asks. The choice is added to both."""
    earlier = set(others) & set(known)
    fit = (earlier if len(earlier) >= PARTNERS else set(others)) - meant
    if not fit:
        return []
    found = min(fit, key=lambda name: (known[name], name))
    known[found] += 1
    meant.add(found)
    return [found]


async def held_back(session: AsyncSession, job: Job, node: Node, at_work: Collection[str]) -> list[str]:
    """Waiting groups that are not for this node: it has, or had, the other one of the two, or others are to have it.
    As long as there are others."""
    others = set(at_work) - {node.id}
    if not others:
        return []
    found: list[str] = []
    for mine, theirs in ((Twin.second, Twin.first), (Twin.first, Twin.second)):
        item, other = aliased(WorkItem), aliased(WorkItem)
        query = (
            select(item.id, other.node_id, Twin.wanted, item.ordinal)
            .join(Twin, mine == item.id)
            .join(other, other.id == theirs)
            .where(item.job_id == job.id, item.status == ItemStatus.PENDING)
        )
        for waits, holder, those, ordinal in (await session.execute(query)).tuples():
            elsewhere = ordinal < 0 and bool(others & set(those)) and node.id not in those
            if holder == node.id or elsewhere:
                found.append(waits)
    return found


async def forget_old(session: AsyncSession, job: Job) -> None:
    """Twins that nobody has begun while the answer that they were made for grew stale: there is nothing to compare."""
    query = select(WorkItem.id).where(
        WorkItem.job_id == job.id, WorkItem.status == ItemStatus.PENDING, WorkItem.ordinal < 0,
        WorkItem.attempts == 0, WorkItem.leased_version < job.step - job.staleness_budget,
    )  # fmt: skip
    old = list(await session.scalars(query))
    if old:
        await session.execute(delete(WorkItem).where(WorkItem.id.in_(old)))
        await session.execute(delete(Twin).where(Twin.second.in_(old)))


async def note(core: Core, session: AsyncSession, job: Job, node: Node, came: Mapping[str, Answer]) -> bool:
    """Groups that a node alone wrote and handed in. Whether somebody is to be quarantined for what they show."""
    open_ = select(Twin).where(Twin.compared_at.is_(None), or_(Twin.first.in_(list(came)), Twin.second.in_(list(came))))
    caught = False
    for twin in await session.scalars(open_):
        for item in (twin.first, twin.second):
            if item in came and await _compared(core, session, twin, item, node, came[item]):
                await session.flush()
                caught |= await _judge(session, job, twin)
    return caught


async def _compared(core: Core, session: AsyncSession, twin: Twin, item: str, node: Node, answer: Answer) -> bool:
    """Hold an answer against the one that came before, if another node gave that, or keep it."""
    before: dict[str, Any] | None = twin.came
    other = await session.get(Node, before["node"]) if before is not None else None
    if before is None or other is None or before["item"] == item or other.id == node.id or _liar(other):
        twin.came = {"item": item, "node": node.id, **asdict(answer)}
        return False
    gap = max(abs(answer.oldest - before["oldest"]), abs(answer.newest - before["newest"]))
    found = selection.compare(answer.rewards, before["rewards"], gap)
    if item == twin.second:
        found = found.turned
    twin.first_node, twin.second_node = (node.id, other.id) if item == twin.first else (other.id, node.id)
    twin.rise, twin.fall, twin.came, twin.compared_at = list(found.rise), list(found.fall), None, core.clock()
    return True


def _liar(node: Node) -> bool:
    return node.quarantined_at is not None or node.caught is not None


async def _judge(session: AsyncSession, job: Job, twin: Twin) -> bool:
    """What the two nodes are worth now; whether one of them is caught. The one that more speaks against comes first:
    once it is caught, its twins say nothing of others any more."""
    nodes = [await session.get_one(Node, name) for name in (twin.first_node, twin.second_node) if name]
    weighed = [(await _said(session, job, node), node) for node in nodes]
    caught = False
    for found, node in sorted(weighed, key=lambda pair: -pair[0].worst):
        told = await _said(session, job, node) if caught else found
        node.twins, node.twin_doubt = told.twins, told.doubt
        why = selection.guilt(told)
        if why and not _liar(node):
            node.caught, caught = why, True
            await session.flush()
    return caught


def _of(node: Node, job: Job) -> ColumnElement[bool]:
    whose = or_(Twin.first_node == node.id, Twin.second_node == node.id)
    return (Twin.job_id == job.id) & Twin.compared_at.is_not(None) & whose


async def _said(session: AsyncSession, job: Job, node: Node) -> selection.Said:
    """All that is on record of a node. What liars did says nothing."""
    no_liar = select(Node.id).where(Node.job_id == job.id, Node.quarantined_at.is_(None), Node.caught.is_(None))
    honest = set(await session.scalars(no_liar))
    testimony: dict[str, list[selection.Comparison]] = {}
    for twin in await session.scalars(select(Twin).where(_of(node, job)).order_by(Twin.compared_at, Twin.second)):
        found = selection.Comparison(tuple(twin.rise), tuple(twin.fall))
        mine = twin.first_node == node.id
        other = (twin.second_node if mine else twin.first_node) or ""
        if other in honest:
            testimony.setdefault(other, []).append(found if mine else found.turned)
    return selection.said(testimony)


async def _partners(session: AsyncSession, job: Job, node: Node) -> Counter[str]:
    """How often a node was compared with which others."""
    query = select(Twin.first_node, Twin.second_node).where(_of(node, job))
    pairs = (await session.execute(query)).tuples()
    return Counter(name for pair in pairs for name in pair if name and name != node.id)


async def _meant(session: AsyncSession, job: Job) -> set[str]:
    """Nodes for whom a twin waits."""
    query = (
        select(Twin.wanted)
        .join(WorkItem, WorkItem.id == Twin.second)
        .where(WorkItem.job_id == job.id, WorkItem.status == ItemStatus.PENDING, WorkItem.ordinal < 0)
    )
    return {name for names in await session.scalars(query) for name in names}
