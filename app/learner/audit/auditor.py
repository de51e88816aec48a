"""Audits beside the training: a thread that computes groups again and tells what it finds.

Invariant: a group that was held for its audit reaches the buffer only if no fault was found in it; of a node in
quarantine nothing that is still here is trained on. What the control service withdraws is forgotten, so that another
node's answer to the same work item is welcome.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from app.learner.audit.custody import Case, Custody
from app.learner.audit.decide import judge
from app.learner.audit.heldout import Kind, greedy, unread
from app.learner.audit.look import Scorer, audit_of, look
from app.learner.buffer import Group, ReplayBuffer
from app.learner.outbox import Directives
from app.learner.threads import watched
from app.protocol.audits import Audit, AuditAnswer, AuditReport, Verdict
from app.protocol.errors import EchoError, LearnerError, TaskFailed
from app.protocol.job import JobSpec
from app.protocol.learner import TrajectoryRef

log = logging.getLogger(__name__)
AT_ONCE = 16
"""Audits that are told together."""
BEHIND = 256
"""With so many under way, groups that are trained on anyway are not audited as well; they are counted."""


class AuditsCall(Protocol):
    """The part of the control service that is needed here."""

    def audits(self, body: AuditReport) -> AuditAnswer: ...


class RewardCheck(Protocol):
    """Rewards computed again."""

    def off(self, group: Group, *, heldout: bool = False) -> float | None:
        """How far they are off; None if there is nothing to hold them against. Raises TaskFailed: it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class _Task:
    case: Case
    first: bool
    """It is not in the buffer, and gets there only if nothing is found."""
    heldout: Kind = ""
    """It answers a held-out prompt, and has nothing to do with the buffer."""


class Auditor:
    """Between inbox and buffer. `receive` and `banish` may be called from any thread."""

    def __init__(
        self,
        spec: JobSpec,
        scorer: Scorer,
        rewards: RewardCheck,
        control: AuditsCall,
        buffer: ReplayBuffer,
        directives: Directives,
        *,
        never: Callable[[int], bool] = lambda _: False,
        draw: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`never`: whether a version was certainly never published. `draw` decides what is audited; by default by
        numbers that nobody outside this process can know."""
        self._trust = spec.trust
        self._rewarded = spec.rewards != "learner"
        self._chosen = spec.batch.prune is not None
        self._scorer = scorer
        self._rewards = rewards
        self._control = control
        self._buffer = buffer
        self._directives = directives
        self._never = never
        self._clock = clock
        self._custody = Custody(spec.trust, draw or random.Random(secrets.randbits(256)).random)
        self._queue: deque[_Task] = deque()
        self._unread: list[Audit] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._busy = False
        self._thread = watched("auditor", self._run, directives.fail)
        self._done: dict[str, int] = {}
        self._seconds = 0.0
        self._unscored = 0
        self._skipped = 0

    def start(self) -> None:
        """Begin to audit."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Audit nothing more; waits up to `timeout_s` for what runs."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._unread or self._busy), timeout_s)

    def metrics(self) -> dict[str, float]:
        """Since this process began: audits by verdict, the seconds that they took, those whose rewards could not be
        computed again (`audits_unscored`), and those that were drawn and left out because BEHIND were under way
        (`audits_skipped`). And how many wait now."""
        with self._changed:
            return {f"audits_{verdict}": float(n) for verdict, n in sorted(self._done.items())} | {
                "audit_s": self._seconds,
                "audits_waiting": float(len(self._queue) + self._custody.waiting),
                "audits_unscored": float(self._unscored),
                "audits_skipped": float(self._skipped),
            }

    def receive(self, group: Group, ref: TrajectoryRef) -> None:
        """A group that came in: to the buffer, to be audited, or both."""
        others = set(ref.written_by.get(group.work_item, ())) - {ref.node_id}
        case = Case(group, ref.interruptible, bool(others))
        with self._changed:
            if self._custody.banished(group.node):
                return
            self._custody.known(group.node, ref.audits_passed)
            self._place(case)

    def doubt(self, group: Group, ref: TrajectoryRef) -> None:
        """A group that was refused because of its rewards: it is audited whatever the draw, and not trained on."""
        others = set(ref.written_by.get(group.work_item, ())) - {ref.node_id}
        with self._changed:
            if not self._custody.banished(group.node):
                self._queue.append(_Task(Case(group, ref.interruptible, bool(others)), first=False))
                self._changed.notify_all()

    def examine(self, group: Group, ref: TrajectoryRef) -> None:
        """An answer to a held-out prompt, of a file that has such: it is audited whatever the draw."""
        kind: Kind = "greedy" if group.work_item in ref.greedy else "sampled"
        with self._changed:
            if not self._custody.banished(group.node):
                self._queue.append(_Task(Case(group, ref.interruptible), first=False, heldout=kind))
                self._changed.notify_all()

    def unreadable(self, ref: TrajectoryRef, items: Iterable[str], verdict: Verdict, detail: str) -> None:
        """Answers to held-out prompts that are not what was committed, or not there any more."""
        with self._changed:
            self._unread += [
                unread(ref.node_id, item, "greedy" if item in ref.greedy else "sampled", verdict, detail)
                for item in items
            ]
            self._changed.notify_all()

    def banish(self, nodes: Iterable[str]) -> None:
        """These are in quarantine: nothing of theirs that is here is trained on."""
        with self._changed:
            named = set(nodes)
            gone = self._custody.banish(named)
            gone += [t.case.group.work_item for t in self._queue if t.case.node in named]
            self._queue = deque(t for t in self._queue if t.case.node not in named)
        self._buffer.withdraw(gone, named)

    def banished(self, node: str) -> bool:
        """Whether a node is in quarantine, so that others answer what it answered."""
        with self._changed:
            return self._custody.banished(node)

    def _place(self, case: Case) -> None:
        """Where a group goes; under the lock."""
        way = self._custody.receive(case)
        if way in ("beside", "train") and self._buffer.add(case.group) and way == "beside":
            if sum(not task.heldout for task in self._queue) < BEHIND:
                self._queue.append(_Task(case, first=False))
            else:
                self._skipped += 1
        elif way == "first":
            self._queue.append(_Task(case, first=True))
        self._changed.notify_all()

    def _run(self) -> None:
        # At the training's own priority: on shared cores what waits for its audit would else wait for the training to
        # stand still, which waits for it in turn.
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._unread or self._stopped, 60)
                if self._stopped:
                    return
                tasks = self._next()
                unread, self._unread = self._unread[:AT_ONCE], self._unread[AT_ONCE:]
                self._busy = bool(tasks or unread)
            try:
                if unread:
                    self._tell(unread)
                if tasks:
                    self._audit(tasks)
            except EchoError as error:
                if not self._stopped:
                    self._directives.fail(error)
                return
            except (RuntimeError, ValueError, OSError) as error:
                # PyTorch's way to say that the memory does not suffice, mostly. What waits for its audit would wait
                # for ever, and the learner with it.
                self._directives.fail(LearnerError(f"an audit failed: {error!r}"[:500]))
                return
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> list[_Task]:
        """Some that are due, under the lock: what the learner may be waiting for, then what an evaluation waits for,
        then what is trained on anyway."""
        tasks = sorted(self._queue, key=lambda task: 0 if task.first else 1 if task.heldout else 2)[:AT_ONCE]
        taken = {id(task) for task in tasks}
        self._queue = deque(task for task in self._queue if id(task) not in taken)
        return tasks

    def _audit(self, tasks: list[_Task]) -> None:
        """Compute some groups again, release those that are good, tell, and do what follows for the others."""
        found: list[Audit] = []
        # One version after the other: each change copies a model.
        for task in sorted(tasks, key=lambda t: (t.case.version, not t.first)):
            if self._stopped or self._custody.banished(task.case.node):
                continue
            began = self._clock()
            off, unscored = self._rewards_off(task)
            audit = self._look(task, off, unscored)
            with self._changed:
                self._done[audit.verdict] = self._done.get(audit.verdict, 0) + 1
                self._unscored += bool(unscored)
                self._seconds += self._clock() - began
                if task.first and audit.clean and not self._custody.banished(task.case.node):
                    self._buffer.add(task.case.group)
                if not task.heldout:
                    self._again(task, audit, scored=not unscored)
            found.append(audit)
        if found:
            self._tell(found)

    def _tell(self, found: list[Audit]) -> None:
        bad = [audit for audit in found if not audit.clean]
        # Nothing of a node that will be in quarantine is taken for a step while that is being decided.
        aside = self._buffer.set_aside({a.node_id for a in bad if a.verdict == "failed"})
        answer = self._control.audits(AuditReport(audits=found))
        banished = set(answer.quarantined)
        self.banish(banished)
        self._buffer.withdraw(answer.withdrawn, banished)
        self._buffer.put_back(entry for entry in aside if entry[2].node not in banished)
        for audit in bad:
            log.warning("group %s of node %s: %s", audit.work_item, audit.node_id, audit.detail)
            if audit.node_id not in banished and not audit.heldout:
                self._buffer.discard(audit.work_item)

    def _again(self, task: _Task, audit: Audit, *, scored: bool) -> None:
        """Those that waited for this audit; under the lock."""
        if not self._custody.banished(task.case.node):
            for waiting in self._custody.settled(task.case, task.first, audit, scored=scored):
                self._place(waiting)

    def _rewards_off(self, task: _Task) -> tuple[float | None, str]:
        """How far its rewards are off, and why that is not known, if it should be."""
        group = task.case.group
        try:
            return (self._rewards.off(group, heldout=bool(task.heldout)) if self._rewarded else None), ""
        except TaskFailed as error:
            log.warning("the rewards of group %s of node %s are unknown: %s", group.work_item, group.node, error.detail)
            return None, error.detail

    def _look(self, task: _Task, off: float | None, unscored: str) -> Audit:
        case, bound = task.case, self._trust.max_logprob_rms
        if task.heldout == "greedy":
            return greedy(case.group, self._scorer, self._never, reward_off=off, max_rms=bound, unscored=unscored)
        found = look(
            case.group, self._scorer, self._never,
            reward_off=off, foreign=case.foreign, chosen=self._chosen and not task.heldout,
        )  # fmt: skip
        found = replace(found, unscored=unscored)
        audit = audit_of(case.group, case.version, found, judge(found, bound, self._trust.max_proof_misses))
        return audit.model_copy(update={"heldout": task.heldout})
