"""Audits written down, and nodes that they convict taken out, with what they brought.

Invariant: an audit counts once, however often it is told. With the quarantine of a node, in the same transaction, all
of its groups that were not trained on are pending again, so that other nodes answer them, and nothing that it began is
gone on from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import bids, heldout, partials, prompts, tokens, trust
from app.fleet.core import Core
from app.fleet.sizes import size_of
from app.protocol.audits import Audit, AuditAnswer
from app.protocol.job import JobSpec, JobStatus
from app.storage.models import AuditRow, ExamItem, ItemStatus, Job, Lease, Node, WorkItem
from providers.base import Billing

if TYPE_CHECKING:
    from app.fleet.roster import Roster

COOLDOWN_S = bids.COOLDOWN_MAX_S
"""A machine that lied is left alone for as long as any ever is."""


@dataclass(slots=True)
class Taken:
    """What became of a report."""

    answer: AuditAnswer
    objects: list[str | None]
    """Beginnings of groups that nobody goes on from; to be removed after the transaction."""


async def take(core: Core, roster: Roster, session: AsyncSession, job: Job, audits: Iterable[Audit]) -> Taken:
    """Write audits down and act on them."""
    bound = JobSpec.model_validate(job.spec).trust.max_logprob_rms
    withdrawn: list[str] = []
    objects: list[str | None] = []
    for audit in audits:
        node = await session.get(Node, audit.node_id)
        if node is None or node.job_id != job.id or await _known(session, audit):
            continue
        weighed = await heldout.weighed(session, audit)
        session.add(_row(core, job, audit))
        core.metrics.audits.labels(job.id, audit.verdict).inc()
        standing = trust.after(standing_of(node), weighed, bound)
        _keep(node, standing)
        why = trust.guilt(standing, audit, bound)
        if why and node.quarantined_at is None:
            items, keys = await quarantine(core, roster, session, job, node, why)
            withdrawn += items
            objects += keys
    await session.flush()
    convicted = await give_up_if_hopeless(session, job)
    return Taken(AuditAnswer(withdrawn=withdrawn, quarantined=convicted), objects)


async def give_up_if_hopeless(session: AsyncSession, job: Job) -> list[str]:
    """A job whose honest nodes all look like liars would rent and expel machines until its money is gone. Returns the
    nodes that are in quarantine."""
    convicted = await quarantined(session, job.id)
    passed = await session.scalar(select(func.sum(Node.audits_passed)).where(Node.job_id == job.id))
    if job.outcome is None and trust.hopeless(len(convicted), int(passed or 0)):
        job.outcome, job.status_reason = (
            JobStatus.FAILED,
            f"{len(convicted)} nodes were quarantined and no audit has ever passed: nodes and learner differ in "
            "engine, model files or task package (the events node_quarantined say in what), or trust.max_logprob_rms "
            "is low",
        )
    return convicted


async def quarantine(
    core: Core, roster: Roster, session: AsyncSession, job: Job, node: Node, why: str
) -> tuple[list[str], list[str | None]]:
    """Take a node out for lying. Returns its groups that are pending again, and objects that are of no use any more."""
    lease = await session.get_one(Lease, node.lease_id)
    said = f"quarantined: {why}"
    node.quarantined_at, node.drain = core.clock(), True
    items, objects = await _withdraw(core, session, job, node)
    await roster.expel(session, node, lease, said, cooldown_s=COOLDOWN_S)
    core.metrics.quarantined.labels(job.id).inc()
    core.emit(
        session, job.id, "node_quarantined",
        f"{lease.gpu_name} on machine {lease.machine_id}: {why}; {len(items)} untrained groups of it are done again",
        node=node.id, lease=lease.id, audits=node.audits, failures=node.audit_failures, rms=node.audit_rms,
        kl=node.audit_kl, z=round(standing_of(node).z, 3), withdrawn=len(items),
    )  # fmt: skip
    return items, objects


async def _withdraw(core: Core, session: AsyncSession, job: Job, node: Node) -> tuple[list[str], list[str | None]]:
    objects = await _forget_begun(session, job, node)
    # Not what somebody else finished of its beginnings: an audit of such a group says whether it is any good.
    accepted = select(WorkItem).where(
        WorkItem.job_id == job.id, WorkItem.status == ItemStatus.ACCEPTED, WorkItem.node_id == node.id
    )
    withdrawn, asked, samples = list[str](), list[int](), 0
    for item in await session.scalars(accepted):
        partials.forget(item, unused=True)
        # `trajectory_seq` stays: a step that the learner is in may have it already.
        item.status, item.node_id, item.version, item.deadline_at = ItemStatus.PENDING, None, None, None
        withdrawn.append(item.id)
        asked.append(item.prompt_index)
        size = size_of(job, item)
        job.rollouts_accepted -= size
        node.rollouts_accepted -= size
        samples += size
    tokens.reckon(core, job, "quarantined", samples)
    await prompts.forget(session, job, asked)
    await session.execute(
        update(ExamItem)
        .where(ExamItem.job_id == job.id, ExamItem.node_id == node.id, ExamItem.status == ItemStatus.ACCEPTED)
        .values(status=ItemStatus.PENDING, node_id=None, deadline_at=None, trajectory_seq=None)
    )
    return withdrawn, objects


async def _forget_begun(session: AsyncSession, job: Job, node: Node) -> list[str | None]:
    """Beginnings that the node wrote any part of. Who is at one may have it already: it stays known who wrote it."""
    query = select(WorkItem).where(
        WorkItem.job_id == job.id,
        WorkItem.status.in_([ItemStatus.PENDING, ItemStatus.LEASED]),
        WorkItem.partial_key.is_not(None),
    )
    begun = [item for item in await session.scalars(query) if node.id in item.written_by]
    return [partials.forget(item, unused=item.status == ItemStatus.PENDING) for item in begun]


async def quarantined(session: AsyncSession, job_id: str) -> list[str]:
    """The job's nodes that are in quarantine."""
    query = select(Node.id).where(Node.job_id == job_id, Node.quarantined_at.is_not(None)).order_by(Node.id)
    return list(await session.scalars(query))


async def told(session: AsyncSession, node_id: str) -> dict[str, Any]:
    """What an auditor has to know of who handed in a file; fields of TrajectoryRef."""
    query = select(Node.audits_passed, Lease.billing).join(Lease, Lease.id == Node.lease_id).where(Node.id == node_id)
    found = (await session.execute(query)).tuples().first()
    if found is None:
        return {}
    return {"audits_passed": found[0], "interruptible": found[1] != Billing.ON_DEMAND}


def standing_of(node: Node) -> trust.Standing:
    """A node's standing as its row has it."""
    return trust.Standing(
        audits=node.audits, passed=node.audits_passed, failures=node.audit_failures, rms=node.audit_rms,
        kl=node.audit_kl, drift=node.audit_drift, surprise=node.audit_surprise, variance=node.audit_variance,
        spread=node.audit_spread, jump=node.audit_jump, excess=node.audit_excess, ungreedy=node.audit_ungreedy,
    )  # fmt: skip


def _keep(node: Node, standing: trust.Standing) -> None:
    node.audits, node.audits_passed, node.audit_failures = standing.audits, standing.passed, standing.failures
    node.audit_rms, node.audit_kl, node.audit_drift = standing.rms, standing.kl, standing.drift
    node.audit_surprise, node.audit_variance = standing.surprise, standing.variance
    node.audit_spread, node.audit_jump, node.audit_excess = standing.spread, standing.jump, standing.excess
    node.audit_ungreedy = standing.ungreedy


async def _known(session: AsyncSession, audit: Audit) -> bool:
    query = select(AuditRow.id).where(AuditRow.node_id == audit.node_id, AuditRow.work_item == audit.work_item)
    return (await session.scalars(query)).first() is not None


def _row(core: Core, job: Job, audit: Audit) -> AuditRow:
    return AuditRow(
        job_id=job.id, node_id=audit.node_id, work_item=audit.work_item, at=core.clock(), version=audit.version,
        verdict=audit.verdict, fault=audit.fault, tokens=audit.tokens, rms=audit.rms, kl=audit.kl,
        reward_ok=audit.reward_ok, detail=audit.detail,
    )  # fmt: skip
