"""Work that a node gives back before its lease is over, and what becomes of groups that nobody can answer.

Invariant: what is given back is somebody else's at once; a failure counts against the group, never as a reward. A group
that failed often enough, by different nodes if there are others, is dropped with its reason, and admission lets another
one out in its place. It counts against the node too: one that fails at everything is given up like one whose files are
refused.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import failures, partials, replay
from app.fleet.core import Core
from app.fleet.exams import Exams, at_work
from app.protocol.job import JobStatus
from app.protocol.node import Report
from app.storage.models import ExamItem, ItemStatus, Job, Node, WorkItem

FAILED = ("task_error", "engine_error")
"""Reports of groups that could not be scored, or sampled."""
GIVEN = (*FAILED, "handed_back")


def named(report: Report) -> list[str]:
    """The work items that a report gives back."""
    if report.kind not in GIVEN:
        return []
    return report.work_items or ([report.subject] if report.kind == "task_error" else [])


async def take(core: Core, session: AsyncSession, node: Node, report: Report) -> list[str | None]:
    """Those of the items that are leased to the node are pending again, or dropped. Returns objects of no use any
    more, to be removed after the transaction."""
    items = named(report)
    if not items:
        return []
    job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
    if report.kind not in FAILED:
        await _give_back(session, node, items)
        return []
    query = select(WorkItem).where(
        WorkItem.id.in_(items), WorkItem.node_id == node.id, WorkItem.status == ItemStatus.LEASED
    )
    exam = select(ExamItem).where(
        ExamItem.id.in_(items), ExamItem.node_id == node.id, ExamItem.status == ItemStatus.LEASED
    )
    groups, held_out = list(await session.scalars(query)), list(await session.scalars(exam))
    if groups or held_out:
        await _blame(session, job, node)
    spare: list[str | None] = []
    for item in groups:
        spare += await _fail(core, session, job, item, report)
    for asked in held_out:
        await Exams(core).fail(session, job, asked, f"{report.kind}: {report.detail}")
    return spare


async def _blame(session: AsyncSession, job: Job, node: Node) -> None:
    """A failure counts like a refused file, until something of the node is accepted. Not where nothing of the job ever
    was and others fail as well: it may be the job, which would rent a machine for every few groups that it drops."""
    if job.rollouts_accepted == 0:
        query = select(WorkItem.failed_by).where(WorkItem.job_id == job.id, WorkItem.failures > 0)
        if failures.named(await session.scalars(query)) - {node.id}:
            return
    node.files_refused += 1


async def _give_back(session: AsyncSession, node: Node, items: list[str]) -> None:
    query = select(WorkItem).where(
        WorkItem.id.in_(items), WorkItem.node_id == node.id, WorkItem.status == ItemStatus.LEASED
    )
    for item in await session.scalars(query):
        item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
    await Exams.hand_back(session, node.id, items)


async def _fail(core: Core, session: AsyncSession, job: Job, item: WorkItem, report: Report) -> list[str | None]:
    failures.count(item, item.node_id or "")
    item.status, item.node_id, item.deadline_at = ItemStatus.PENDING, None, None
    if not failures.hopeless(item.failures, item.failed_by, await at_work(session, job)):
        return []
    spare = partials.forget(item, unused=True)
    replay.drop(core, job, item, report.kind, lag=None)
    said = failures.said(item.failures, item.failed_by, f"{report.kind}: {report.detail}")
    core.emit(
        session, job.id, "group_given_up", f"prompt {item.prompt_index}: {said}; another one takes its place",
        work_item=item.id, nodes=item.failed_by,
    )  # fmt: skip
    await _stop_if_wrong(session, job)
    return [spare]


async def _stop_if_wrong(session: AsyncSession, job: Job) -> None:
    """A job of which no prompt can be answered would rent machines until its money is gone."""
    if job.outcome is not None or job.rollouts_accepted:
        return
    await session.flush()
    query = select(WorkItem.failed_by).where(
        # By its status too, for which there is an index: other writers wait for this.
        WorkItem.job_id == job.id, WorkItem.status == ItemStatus.DROPPED, WorkItem.drop_reason.in_(FAILED)
    )  # fmt: skip
    dropped = list(await session.scalars(query))
    if failures.job_is_wrong(dropped, job.rollouts_accepted, job.spec["batch"]["prompts"]):
        job.outcome, job.status_reason = (
            JobStatus.FAILED,
            f"{len(dropped)} groups could not be sampled or scored by any node, and none could: is the task right? "
            "(the events group_given_up say why)",
        )
