"""Work items made and handed out: the seeded order, group sizes, lengths and speeds as the database has them.

Invariant: the prompts of a job come in the order that its seed decides; which of a small window of them a node gets,
`app/fleet/dispatch.py` decides, never the node. A few go out twice (`app/fleet/twins.py`), at no place of that order;
neither the id nor the seed of a group says which, for both are made with a key that nodes don't have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import admission, dispatch, failures, group_sizes, partials, prompts, tokens, twins
from app.fleet.core import Core
from app.fleet.group_sizes import Tried
from app.fleet.sizes import size_of
from app.protocol.job import BatchSpec
from app.protocol.node import NodeState
from app.storage.models import ItemStatus, Job, Node, PromptStats, WorkItem

MOST_IN_VAIN = 2
"""Leases of which nothing came back, after which a begun group is begun anew: it may be what nodes die of."""


@dataclass(frozen=True, slots=True)
class HandedOut:
    """Items leased to a node, in the order in which it should begin; objects that nobody needs any more; why there are
    no items."""

    items: list[WorkItem]
    spare: list[str | None]
    reason: str = ""


async def take(
    core: Core,
    session: AsyncSession,
    job: Job,
    node: Node,
    *,
    version: int,
    count: int,
    ahead: int,
    draw: Callable[[], float],
) -> HandedOut:
    """Lease up to `count` groups to a node. `ahead`: groups that are out or accepted and not trained on; `draw` gives
    secret uniform numbers in [0, 1), which decide what gets a twin."""
    at_work = await _at_work(session, job)
    names = {n.id for n in at_work}
    await twins.forget_old(session, job)
    waiting = await _waiting(core, session, job, node, names, count)
    if not waiting:
        return HandedOut([], [])
    spoilt = [i for i in waiting if i.partial_key is not None and i.attempts - len(i.written_by) >= MOST_IN_VAIN]
    spare = [_throw_away(core, job, item) for item in spoilt]
    stats = await prompts.stats(session, job, [i.prompt_index for i in waiting])
    candidates = [_candidate(job, item, stats) for item in waiting]
    choice = dispatch.choose(
        candidates,
        count=count,
        version=version,
        speeds=_speeds(job, node, at_work, ahead),
        pace=_pace(job, at_work),
        held_tokens=await _held(session, job, node),
        ahead=ahead,
    )
    by_ordinal = {item.ordinal: item for item in waiting}
    spare += [_throw_away(core, job, by_ordinal[ordinal]) for ordinal in choice.dropped]
    chosen = [by_ordinal[ordinal] for ordinal in choice.ordinals]
    _make(session, job, waiting, chosen)
    _lease(core, job, node, version, chosen)
    await twins.make(session, job, node, chosen, names, named=lambda n: _named(core, job, n), draw=draw)
    return HandedOut(chosen, spare, choice.reason)


async def _waiting(
    core: Core, session: AsyncSession, job: Job, node: Node, at_work: Collection[str], count: int
) -> list[WorkItem]:
    """Begun groups, then the lowest waiting ordinals up to the window's end; those that were never made are new
    objects outside the session. Those at which the node failed are for others, as long as there are any."""
    span = dispatch.window(count, int(job.spec["batch"]["prompts"]))
    if span <= 0:
        return []
    pending = select(WorkItem).where(WorkItem.job_id == job.id, WorkItem.status == ItemStatus.PENDING)
    failed = await session.scalars(pending.where(WorkItem.failures > 0))
    not_for = [item.id for item in failed if failures.held_back(item.failed_by, node.id, at_work)]
    not_for += await twins.held_back(session, job, node, at_work)
    query = pending.where(WorkItem.id.not_in(not_for)).order_by(WorkItem.ordinal)
    begun = list(await session.scalars(query.where(WorkItem.partial_key.is_not(None)).limit(span)))
    unbegun = query.where(WorkItem.partial_key.is_(None))
    again = list(await session.scalars(unbegun.where(WorkItem.ordinal < 0).limit(span)))
    fresh = list(await session.scalars(unbegun.where(WorkItem.ordinal >= 0).limit(span)))
    lowest = fresh[0].ordinal if fresh else job.next_ordinal
    fresh = [item for item in fresh if item.ordinal < lowest + span]
    if job.next_ordinal < lowest + span:
        fresh += await _new(core, session, job, range(job.next_ordinal, lowest + span))
    # Twins are beside the order: one that few nodes may have must not hold its window up.
    return begun + again + [item for item in fresh if item.ordinal < lowest + span]


async def _new(core: Core, session: AsyncSession, job: Job, ordinals: range) -> list[WorkItem]:
    """Work items for these ordinals. Where sizes vary, whole windows of a batch are made at once and kept."""
    batch = BatchSpec.model_validate(job.spec["batch"])
    if batch.group_policy == "uniform":
        return [_item(core, job, ordinal) for ordinal in ordinals]
    made: list[WorkItem] = []
    while job.next_ordinal < ordinals.stop:
        window = range(job.next_ordinal, job.next_ordinal + batch.prompts)
        items = [_item(core, job, ordinal) for ordinal in window]
        stats = await prompts.stats(session, job, [i.prompt_index for i in items])
        least, most = batch.group_bounds
        found = group_sizes.sizes(
            batch.group_policy,
            [_tried(stats.get(item.prompt_index)) for item in items],
            group_size=batch.group_size,
            least=least,
            most=most,
            failure_rate=job.failure_rate,
        )
        for item, size in zip(items, found, strict=True):
            item.group_size = size
        session.add_all(items)
        job.next_ordinal = window.stop
        made += items
    return made


def _tried(stats: PromptStats | None) -> Tried:
    return Tried() if stats is None else Tried(stats.successes, stats.tries)


def _named(core: Core, job: Job, ordinal: int, attempt: int = 0) -> tuple[str, int]:
    """Id and sampling seed (63 bits) of a group: to a node as good as drawn. The seed is another one each time that the
    group goes out: whoever had it before could sample the same and hand it in elsewhere, first."""
    name = core.secrets.derive("group", f"{job.id}:{ordinal}")
    token = core.secrets.derive("group", f"{job.id}:{ordinal}:{attempt}") if attempt else name
    return f"{job.id}-{name[:16]}", int(token[16:32], 16) >> 1


def _item(core: Core, job: Job, ordinal: int) -> WorkItem:
    name, seed = _named(core, job, ordinal)
    prompt = admission.prompt_at(int(job.spec["seed"]), ordinal, job.train_prompts or 1)
    return WorkItem(
        id=name, job_id=job.id, ordinal=ordinal, prompt_index=prompt, seed=seed,
        status=ItemStatus.PENDING, attempts=0, written_by=[],
    )  # fmt: skip


def _make(session: AsyncSession, job: Job, waiting: Sequence[WorkItem], chosen: Sequence[WorkItem]) -> None:
    """Put new items up to the last one chosen on record: those that were passed over wait."""
    last = max((item.ordinal for item in chosen), default=-1)
    new = [item for item in waiting if job.next_ordinal <= item.ordinal <= last]
    session.add_all(new)
    job.next_ordinal = max(job.next_ordinal, last + 1)


def _lease(core: Core, job: Job, node: Node, version: int, items: Sequence[WorkItem]) -> None:
    batch = job.spec["batch"]
    rate = node.mu_measured / batch["group_size"] if node.mu_measured else None
    groups = sum(size_of(job, item) for item in items) / batch["group_size"]
    seconds = admission.lease_deadline(
        t_train=job.t_train, prompts=batch["prompts"], items=groups, node_rate_groups_s=rate
    )
    if batch.get("group_deadline_s") is not None and batch.get("on_late") == "reissue":
        seconds = min(seconds, batch["group_deadline_s"])
    for item in items:
        item.status, item.node_id, item.leased_version = ItemStatus.LEASED, node.id, version
        item.deadline_at = core.clock() + seconds
        if item.attempts:
            item.seed = _named(core, job, item.ordinal, item.attempts)[1]
        item.attempts += 1
        if item.partial_key is None:
            # Whatever was sampled of it before, nothing of that is in what comes back.
            item.partial_node, item.written_by = None, []


def _throw_away(core: Core, job: Job, item: WorkItem) -> str | None:
    """A beginning that can't be admissible any more, or that nobody finishes: its tokens are of no use."""
    tokens.waste(core, job, "stale_partial", item.partial_tokens or 0)
    return partials.forget(item, unused=True)


def _length(job: Job, prompt: PromptStats | None) -> float | None:
    mean, tries = (prompt.mean_length, prompt.tries) if prompt is not None else (None, 0)
    return dispatch.predicted_length(mean, tries, job.length_mean)


def _candidate(job: Job, item: WorkItem, stats: dict[int, PromptStats]) -> dispatch.Candidate:
    length = _length(job, stats.get(item.prompt_index))
    fresh = None if length is None else length * size_of(job, item)
    if item.partial_key is None or fresh is None:
        return dispatch.Candidate(item.ordinal, fresh, item.partial_version, fresh)
    # A group that had begun and is not done yet has at least something left.
    left = max(fresh - (item.partial_tokens or 0), fresh / size_of(job, item) / 2)
    return dispatch.Candidate(item.ordinal, left, item.partial_version, fresh)


async def _at_work(session: AsyncSession, job: Job) -> list[Node]:
    query = select(Node).where(Node.job_id == job.id, Node.state == NodeState.ACTIVE, Node.drain.is_(False))
    return list(await session.scalars(query))


def _speeds(job: Job, node: Node, at_work: Sequence[Node], ahead: int) -> dispatch.Speeds:
    def speed(n: Node) -> float | None:
        if not n.mu_measured:
            # By its self-test alone, which may come out low, it would get no work that could tell better.
            return None
        return dispatch.node_speed(tokens_per_s=n.tokens_per_s, rollouts_per_s=n.mu_measured, job_mean=job.length_mean)

    def able(n: Node) -> bool:
        if n.policy_version is None:
            return False
        left = admission.grantable(
            step=job.step, version=n.policy_version, staleness=job.staleness_budget,
            prompts=job.spec["batch"]["prompts"], ahead=ahead,
        )  # fmt: skip
        return left > 0

    others = [(s, able(n)) for n in at_work if n.id != node.id and (s := speed(n)) is not None]
    return dispatch.Speeds(speed(node), [s for s, _ in others], [s for s, fit in others if fit])


def _pace(job: Job, at_work: Sequence[Node]) -> dispatch.Pace:
    batch = job.spec["batch"]
    pool = sum(n.mu_measured or 0.0 for n in at_work)
    seconds = dispatch.step_seconds(t_train=job.t_train, rollouts=batch["prompts"] * batch["group_size"], mu_pool=pool)
    return dispatch.Pace(job.step, job.staleness_budget, seconds)


async def _held(session: AsyncSession, job: Job, node: Node) -> float:
    """Tokens that the node has still to sample of what is leased to it, as predicted."""
    query = select(WorkItem).where(WorkItem.node_id == node.id, WorkItem.status == ItemStatus.LEASED)
    items = list(await session.scalars(query))
    stats = await prompts.stats(session, job, [i.prompt_index for i in items])
    return sum(_candidate(job, item, stats).tokens or 0.0 for item in items)
