"""Held-out answers that the learner computes again before they count.

Invariant: of a node on probation every answer counts only after the learner found nothing wrong with it; of others some
that no node can know, so many in each evaluation that lies which would change its result are found. An answer with a
fault is withdrawn and asked again, of somebody else if there is anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import uploads
from app.fleet.core import Core
from app.protocol.audits import Audit
from app.protocol.trust_spec import TrustSpec
from app.storage.models import AuditRow, ExamItem, Trajectory

EACH = 8
"""Answers of each node in each evaluation that are computed again, on average. Who lies in half of its answers gets
through one evaluation once in 256 times; of a group to train on as many are computed."""


def share(trust: TrustSpec, *, interruptible: bool, items: int, nodes: int) -> float:
    """The chance with which an answer is computed again of a node that is not on probation, in an evaluation of `items`
    prompts that `nodes` share."""
    wanted = trust.audit_share * (2 if interruptible else 1)
    each = EACH * max(1, nodes) / max(1, items) if trust.each_version else 0.0
    return min(1.0, max(wanted, each))


def chosen(
    items: Sequence[ExamItem], trust: TrustSpec, *, passed: int, share: float, draw: Callable[[], float]
) -> list[ExamItem]:
    """Which of the answers of one file are computed again. Pure but for `draw`: secret uniform numbers in [0, 1).

    `passed`: audits of training groups that the node has passed.
    """
    if trust.off:
        return []
    # One whose answer was found wrong before may be what tells liars.
    return [item for item in items if passed < trust.probation or item.failures or draw() < share]


async def waiting(session: AsyncSession, job_id: str, seqs: Sequence[int]) -> dict[int, list[ExamItem]]:
    """Answers to be computed again, by the number of their file."""
    query = select(ExamItem).where(ExamItem.job_id == job_id, ExamItem.trajectory_seq.in_(seqs)).order_by(ExamItem.id)
    found: dict[int, list[ExamItem]] = {}
    for item in await session.scalars(query):
        found.setdefault(item.trajectory_seq or 0, []).append(item)
    return found


async def weighed(session: AsyncSession, audit: Audit) -> Audit:
    """An audit with what it says of how its node draws.

    Held-out prompts are answered with the same random numbers in each evaluation: the second answer of a node to one
    of them says nothing new, and the likeliest tokens are not drawn at all.
    """
    if not audit.heldout:
        return audit
    head, _, index = audit.work_item.rpartition("-")
    job_id = head.rpartition("-eval-")[0]
    again = select(AuditRow.id).where(
        AuditRow.node_id == audit.node_id,
        AuditRow.work_item.startswith(f"{job_id}-eval-", autoescape=True),
        AuditRow.work_item.endswith(f"-{index}", autoescape=True),
    )
    if audit.heldout == "sampled" and (await session.scalars(again.limit(1))).first() is None:
        return audit
    nothing = {"surprise": 0.0, "variance": 0.0, "spread": 0.0, "jump": 0.0, "excess": 0.0}
    return audit.model_copy(update=nothing)


async def sweep(core: Core) -> None:
    """Remove files of held-out answers of which none is still to be computed again. Not inside a transaction."""
    wanted = select(ExamItem.trajectory_seq).where(ExamItem.trajectory_seq.is_not(None))
    async with core.db.write() as session:
        query = select(Trajectory).where(Trajectory.heldout.is_(True), Trajectory.seq.not_in(wanted))
        done = [(row.seq, row.key) for row in await session.scalars(query)]
        await session.execute(delete(Trajectory).where(Trajectory.seq.in_([seq for seq, _ in done])))
    await uploads.remove(core, [key for _, key in done])
