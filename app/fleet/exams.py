"""Evaluations by the fleet: held-out prompts as work items, so that the learner does not stop for them.

Invariant: answers to held-out prompts are never trained on and count neither as accepted rollouts nor for admission;
a job has at most one exam open, and one that is over leaves an Evaluation and no items. An answer that the learner is
to compute again counts once that has found nothing wrong.
"""

from __future__ import annotations

import logging
import math
import secrets
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import pyarrow as pa
from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import admission, failures, heldout, scores, steps
from app.fleet.core import Core
from app.protocol.audits import Audit
from app.protocol.job import JobSpec
from app.protocol.node import NodeState
from app.protocol.work import WorkItem as WorkItemMessage
from app.storage.models import Evaluation, ExamItem, ItemStatus, Job, Lease, Node, Trajectory
from providers.base import Billing

log = logging.getLogger(__name__)

GREEDY = 1e-6
"""A temperature at which the most likely token has all the probability; samplers take it for greedy."""
WORTH = 0.5
"""An exam that the next one overtakes still counts if this share of it was answered."""


def is_exam(item_id: str) -> bool:
    """Whether an id names an item of an exam."""
    return "-eval-" in item_id


class Exams:
    """Opens exams, hands their items out, takes the answers, closes them."""

    def __init__(self, core: Core, draw: Callable[[], float] | None = None) -> None:
        """`draw` decides what the learner computes again; by default by numbers that nobody can know."""
        self.core = core
        self._draw = draw or secrets.SystemRandom().random

    async def open_if_due(self, session: AsyncSession, job: Job, version: int) -> None:
        """A version was published: begin its exam if one is due, and end the one before."""
        spec = JobSpec.model_validate(job.spec)
        learner, prompts = spec.learner, job.eval_prompts or 0
        if learner.eval_by != "fleet" or not scores.due(version, learner.eval_every, job.exam_step) or prompts == 0:
            return
        await self._close(session, job, overtaken=True)
        job.exam_step = version
        kinds = [(learner.eval_samples, False), *([(1, True)] if learner.eval_greedy else [])]
        for number, (samples, greedy) in enumerate(kinds):
            for index in range(prompts):
                session.add(
                    ExamItem(
                        id=f"{job.id}-eval-{version}-{number * prompts + index}", job_id=job.id, step=version,
                        prompt_index=index, samples=samples, greedy=greedy, status=ItemStatus.PENDING,
                        # The same draws each time, as in the learner's own evaluation: differences are the policy's.
                        seed=admission.item_seed(spec.seed, index), created_at=self.core.clock(),
                    )
                )  # fmt: skip

    async def waiting(self, session: AsyncSession, job: Job, version: int) -> float | None:
        """Seconds that items have waited which a node of `version` may have; None if there are none."""
        query = select(func.min(ExamItem.created_at)).where(
            ExamItem.job_id == job.id, ExamItem.status == ItemStatus.PENDING, ExamItem.step <= version
        )
        since: float | None = await session.scalar(query)
        return None if since is None else self.core.clock() - since

    async def take(
        self, session: AsyncSession, job: Job, node: Node, version: int, groups: int
    ) -> list[WorkItemMessage]:
        """Lease about as many answers as `groups` training groups would be."""
        size = int(job.spec["batch"]["group_size"])
        pending = select(ExamItem).where(
            ExamItem.job_id == job.id, ExamItem.status == ItemStatus.PENDING, ExamItem.step <= version
        )
        others = await at_work(session, job)
        failed = await session.scalars(pending.where(ExamItem.failures > 0))
        not_for = [item.id for item in failed if failures.held_back(item.failed_by, node.id, others)]
        query = (
            pending.where(ExamItem.id.not_in(not_for))
            .order_by(ExamItem.greedy, ExamItem.prompt_index)
            .limit(max(1, groups * size))
        )
        leased: list[ExamItem] = []
        answers = 0
        for item in await session.scalars(query):
            if leased and answers + item.samples > groups * size:
                break
            leased.append(item)
            answers += item.samples
        rate = node.mu_measured / size if node.mu_measured else None
        seconds = admission.lease_deadline(
            t_train=job.t_train, prompts=job.spec["batch"]["prompts"], items=math.ceil(answers / size),
            node_rate_groups_s=rate,
        )  # fmt: skip
        for item in leased:
            item.status, item.node_id, item.deadline_at = ItemStatus.LEASED, node.id, self.core.clock() + seconds
        return [
            WorkItemMessage(
                id=i.id, prompt_index=i.prompt_index, group_size=i.samples, seed=i.seed, deadline_s=seconds,
                split="heldout", temperature=GREEDY if i.greedy else None,
            )
            for i in leased
        ]  # fmt: skip

    @staticmethod
    async def held(session: AsyncSession, node: Node) -> int:
        """Answers that a node has still to give."""
        return await _leased(session, ExamItem.node_id == node.id)

    @staticmethod
    async def answered(session: AsyncSession, node_id: str, items: Sequence[str]) -> list[str]:
        """Those of the items whose answer is this node's."""
        mine = (ExamItem.node_id == node_id) & (ExamItem.status == ItemStatus.ACCEPTED)
        return list(await session.scalars(select(ExamItem.id).where(mine, ExamItem.id.in_(items))))

    @staticmethod
    async def under_way(session: AsyncSession, job: Job) -> int:
        """Answers that all nodes together have still to give."""
        return await _leased(session, ExamItem.job_id == job.id)

    async def accept(
        self,
        session: AsyncSession,
        job: Job,
        node: Node,
        answers: Mapping[str, tuple[int, list[float]]],
        file: Callable[[], Awaitable[Trajectory]],
    ) -> tuple[list[str], bool]:
        """Take answers: item → (version, rewards). Returns those that were still this node's, and whether some of them
        are to be computed again; then `file` puts their file on record. Closes a whole exam."""
        query = select(ExamItem).where(
            ExamItem.id.in_(list(answers)), ExamItem.node_id == node.id, ExamItem.status == ItemStatus.LEASED
        )
        taken = list(await session.scalars(query))
        for item in taken:
            item.version, item.rewards = answers[item.id]
            item.status, item.deadline_at = ItemStatus.ACCEPTED, None
        doubted = await self._doubted(session, job, node, taken)
        if doubted:
            row = await file()
            row.heldout = True
            for item in doubted:
                item.trajectory_seq = row.seq
        await session.flush()
        await self._close(session, job)
        return [item.id for item in taken], bool(doubted)

    async def _doubted(self, session: AsyncSession, job: Job, node: Node, items: Sequence[ExamItem]) -> list[ExamItem]:
        trust = JobSpec.model_validate(job.spec).trust
        if trust.off or not items:
            return []
        lease = await session.get_one(Lease, node.lease_id)
        asked = select(func.count()).select_from(ExamItem).where(ExamItem.job_id == job.id)
        share = heldout.share(
            trust, interruptible=lease.billing != Billing.ON_DEMAND,
            items=await session.scalar(asked) or 0, nodes=len(await at_work(session, job)),
        )  # fmt: skip
        return heldout.chosen(items, trust, passed=node.audits_passed, share=share, draw=self._draw)

    async def settle(self, session: AsyncSession, job: Job, audits: Iterable[Audit]) -> bool:
        """What the learner found of answers that it computed again. Whether some of them are asked again."""
        back = False
        told = [audit for audit in audits if is_exam(audit.work_item)]
        query = select(ExamItem).where(ExamItem.id.in_([audit.work_item for audit in told]), ExamItem.job_id == job.id)
        items = {item.id: item for item in await session.scalars(query)}
        for audit in told:
            item = items.get(audit.work_item)
            if item is None or item.trajectory_seq is None or item.node_id != audit.node_id:
                continue
            item.trajectory_seq = None
            if not audit.clean:
                await self.fail(session, job, item, audit.detail)
                back = True
        await session.flush()
        await self._close(session, job)
        return back

    async def fail(self, session: AsyncSession, job: Job, item: ExamItem, detail: str) -> None:
        """Its node could not answer it, or answered falsely: it is somebody else's, or nobody's if it never works."""
        failures.count(item, item.node_id or "")
        item.status, item.node_id, item.deadline_at, item.rewards = ItemStatus.PENDING, None, None, []
        if failures.hopeless(item.failures, item.failed_by, await at_work(session, job)):
            item.status = ItemStatus.DROPPED
            said = failures.said(item.failures, item.failed_by, detail)
            self.core.emit(
                session, job.id, "group_given_up", f"held-out prompt {item.prompt_index}: {said}; it is left out",
                work_item=item.id, nodes=item.failed_by,
            )  # fmt: skip
        await session.flush()
        await self._close(session, job)

    async def expire(self, session: AsyncSession, job: Job) -> None:
        """Leases past their deadline: the items are pending again, which counts against who held them, as it does for
        training groups: who only ever let evaluations run out would cost money for ever."""
        over = (
            (ExamItem.job_id == job.id)
            & (ExamItem.status == ItemStatus.LEASED)
            & (ExamItem.deadline_at < self.core.clock())
        )
        holders = select(ExamItem.node_id).where(over).distinct()
        for node in list(await session.scalars(select(Node).where(Node.id.in_(holders)))):
            node.files_refused += 1
        await session.execute(
            update(ExamItem).where(over).values(status=ItemStatus.PENDING, node_id=None, deadline_at=None)
        )

    @staticmethod
    async def hand_back(session: AsyncSession, node_id: str, items: Sequence[str] | None = None) -> None:
        """What a node holds (or of it, `items`) is pending again."""
        mine = (ExamItem.node_id == node_id) & (ExamItem.status == ItemStatus.LEASED)
        wanted = mine if items is None else mine & ExamItem.id.in_(items)
        await session.execute(
            update(ExamItem).where(wanted).values(status=ItemStatus.PENDING, node_id=None, deadline_at=None)
        )

    @staticmethod
    async def discard(session: AsyncSession, job: Job) -> None:
        """The learner is done: nobody needs the answers any more."""
        await session.execute(delete(ExamItem).where(ExamItem.job_id == job.id))

    async def _close(self, session: AsyncSession, job: Job, *, overtaken: bool = False) -> None:
        """End the open exam if it is answered, or overtaken by the next."""
        mine = ExamItem.job_id == job.id
        unanswered = mine & ExamItem.status.in_([ItemStatus.PENDING, ItemStatus.LEASED])
        open_ = select(ExamItem.id).where(unanswered | (mine & ExamItem.trajectory_seq.is_not(None))).limit(1)
        if not overtaken and await session.scalar(open_):
            return
        items = list(await session.scalars(select(ExamItem).where(mine)))
        if not items:
            return
        answered = [i for i in items if i.status == ItemStatus.ACCEPTED and i.trajectory_seq is None]
        dropped = sum(i.status == ItemStatus.DROPPED for i in items)
        step = items[0].step
        sampled = [i.rewards for i in answered if not i.greedy]
        if sampled and len(answered) >= WORTH * len(items):
            self._record(session, job, step, answered)
        else:
            self.core.emit(
                session, job.id, "evaluation_overtaken",
                f"v{step}: {len(answered)} of {len(items)} held-out answers had come when the next evaluation was due; "
                "raise learner.eval_every or lower learner.eval_prompts"
                if overtaken
                else f"v{step}: {dropped} of {len(items)} held-out prompts can't be answered; there is no evaluation",
            )  # fmt: skip
        await session.execute(delete(ExamItem).where(ExamItem.job_id == job.id, ExamItem.step == step))

    def _record(self, session: AsyncSession, job: Job, step: int, answered: Sequence[ExamItem]) -> None:
        found = scores.score(
            [i.rewards for i in answered if not i.greedy], [statistics.fmean(i.rewards) for i in answered if i.greedy]
        )
        versions = [i.version for i in answered if i.version is not None]
        session.add(
            Evaluation(
                job_id=job.id, step=step, reward=found.reward, prompts=found.prompts, at=self.core.clock(), by="fleet",
                scores={**asdict(found), "versions": [min(versions), max(versions)]},
            )
        )  # fmt: skip
        steps.show(self.core, job, step, found.reward)
        newest = f"…v{max(versions)}" if max(versions) > step else ""
        many = f", pass@{found.k} {found.pass_at_k:.4f}" if found.k > 1 else ""
        greedy = f", greedy {found.greedy:.4f}" if found.greedy is not None else ""
        self.core.emit(
            session, job.id, "evaluated",
            f"held-out reward of v{step}{newest} by the fleet: {found.reward:.4f}{many}{greedy} over {found.prompts} "
            "prompts",
        )  # fmt: skip


async def _leased(session: AsyncSession, whose: ColumnElement[bool]) -> int:
    query = select(func.sum(ExamItem.samples)).where(whose, ExamItem.status == ItemStatus.LEASED)
    return int(await session.scalar(query) or 0)


async def at_work(session: AsyncSession, job: Job) -> set[str]:
    """The job's nodes that may have work."""
    query = select(Node.id).where(Node.job_id == job.id, Node.state == NodeState.ACTIVE, Node.drain.is_(False))
    return set(await session.scalars(query))


def answers(table: pa.Table) -> dict[str, tuple[int, list[float]]]:
    """Item → (oldest version, rewards by sample) of a checked trajectory table."""
    found: dict[str, tuple[int, dict[int, float]]] = {}
    columns = ("work_item", "sample_index", "span_versions", "reward")
    for item, sample, spans, reward in zip(*(table.column(c).to_pylist() for c in columns), strict=True):
        version, rewards = found.get(item, (min(spans), {}))
        rewards[sample] = reward
        found[item] = (min(version, *spans), rewards)
    return {item: (version, [r for _, r in sorted(rewards.items())]) for item, (version, rewards) in found.items()}
