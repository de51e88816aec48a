"""Rewards on the learner's side: `rewards` "learner" and "both".

Invariant: a group that comes out of here has rewards that the learner computed, or that it found to be right; one whose
reward can't be computed is refused as `unscored`, never given a 0. Of several answers to one work item that come
while one of them is here, the newest is what counts: the others were withdrawn. Neither the training step nor the
thread that follows the index ever computes a reward; what waits for one is bounded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from app.learner.buffer import Group
from app.protocol.errors import EchoError
from app.protocol.job import JobSpec
from app.protocol.learner import TrajectoryRef
from app.tasks.base import Task, is_deterministic
from app.tasks.sandbox import QUEUE_SHARE, SandboxTask
from app.tasks.scoring import reward_of_turns, turns_of

log = logging.getLogger(__name__)
Why = Literal["unscored", "wrong_reward"]
Onward = Callable[[Group, TrajectoryRef], None]
Refuse = Callable[[Group, TrajectoryRef, Why], None]
SAME = 1e-6
"""Rewards that differ by no more, for each unit of their size, are the same: files hold them in float32."""
MOST_WAITING = 64
"""Groups that are being scored or wait for it; with more the index is not followed any further."""
PATIENCE_S = 600.0
"""For a group of a task that doesn't say how long it may take."""
_LOOK_S = 1.0


@dataclass(slots=True, eq=False)
class _Job:
    group: Group
    ref: TrajectoryRef
    came: float
    begun: float | None = None
    """Its patience runs from then on: what waits behind slow ones is not slow itself."""
    rewards: Future[list[float]] | None = None


class Rewarder:
    """Groups come by `take`, from one thread, and go on from threads of this one."""

    def __init__(
        self,
        spec: JobSpec,
        task: Task,
        tokenizer: Any,
        onward: Onward,
        refuse: Refuse,
        *,
        most: int = MOST_WAITING,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokenizer` is nobody else's. `refuse` is told of groups that don't go on, `onward` gets the others."""
        self._check = spec.rewards == "both"
        self._task = task
        self._tokenizer = tokenizer
        self._onward = onward
        self._refuse = refuse
        self._most = most
        self._clock = clock
        self._patience_s = patience_s or patience(task, spec.batch.group_bounds[1])
        self._pool = ThreadPoolExecutor(threads(spec), thread_name_prefix="rewards")
        self._jobs: dict[str, _Job] = {}
        """By work item."""
        self._last_begun = clock()
        self._stopped = False
        self._changed = threading.Condition()

    def take(self, group: Group, ref: TrajectoryRef) -> None:
        """Have a group scored; waits while there are too many. The same file's group again is ignored, one of a newer
        file replaces what is here of its work item."""
        if self._check and not is_deterministic(self._task):
            self._onward(group, ref)
            return
        turns = [turns_of(self._tokenizer, r.completion_ids, r.generated) for r in group.rollouts]
        self._wait_for_room()
        with self._changed:
            held = self._jobs.get(group.work_item)
            if self._stopped or (held is not None and held.ref.seq >= ref.seq):
                return
            job = self._jobs[group.work_item] = _Job(group, ref, self._clock())
            future = job.rewards = self._pool.submit(self._score, job, turns)
        if held is not None and held.rewards is not None:
            held.rewards.cancel()
        future.add_done_callback(partial(self._done, job))

    def sweep(self) -> None:
        """Give up what takes too long, and what waits where nothing has been begun for as long."""
        now = self._clock()
        with self._changed:
            late = [job for job in self._jobs.values() if now - self._since(job) > self._patience_s]
        for job in late:
            self._end(job, self._late)

    def _late(self, job: _Job) -> None:
        what = "takes longer than" if job.begun is not None else "waits for others that hang, for more than"
        self._unscored(job, f"{what} {self._patience_s:.0f} s")

    def _since(self, job: _Job) -> float:
        return job.begun if job.begun is not None else max(job.came, self._last_begun)

    def stop(self) -> None:
        """Score nothing more; what runs is left to end by itself."""
        with self._changed:
            self._stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait_for_room(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped or len(self._jobs) < self._most, _LOOK_S):
                    return
            self.sweep()

    def _score(self, job: _Job, turns: Sequence[Sequence[str]]) -> list[float]:
        with self._changed:
            job.begun = self._last_begun = self._clock()
        prompt = self._task.train(job.group.rollouts[0].prompt_index)
        return [reward_of_turns(self._task, prompt, said) for said in turns]

    def _done(self, job: _Job, future: Future[list[float]]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            rewards = future.result()
            self._end(job, lambda job: self._settle(job, rewards))
        else:
            # A task is a plug-in and may raise anything.
            said = error.detail if isinstance(error, EchoError) else repr(error)
            self._end(job, lambda job: self._unscored(job, f"failed: {said}"[:500]))

    def _settle(self, job: _Job, rewards: Sequence[float]) -> None:
        if not self._check:
            pairs = zip(job.group.rollouts, rewards, strict=True)
            self._onward(replace(job.group, rollouts=tuple(replace(r, reward=x) for r, x in pairs)), job.ref)
        elif off := wrong([r.reward for r in job.group.rollouts], rewards):
            log.warning("group %s of node %s: %s", job.group.work_item, job.group.node, off)
            self._refuse(job.group, job.ref, "wrong_reward")
        else:
            self._onward(job.group, job.ref)

    def _unscored(self, job: _Job, why: str) -> None:
        log.warning("the reward of group %s %s", job.group.work_item, why)
        self._refuse(job.group, job.ref, "unscored")

    def _end(self, job: _Job, end: Callable[[_Job], None]) -> None:
        """What becomes of a group, once: whichever comes first, its reward, the end of patience, or a newer answer."""
        with self._changed:
            first = self._jobs.get(job.group.work_item) is job
            if first:
                del self._jobs[job.group.work_item]
            self._changed.notify_all()
        if first:
            end(job)


def wrong(claimed: Sequence[float], found: Sequence[float]) -> str:
    """What is wrong with a node's rewards, in words; nothing if they are those that were found. Pure."""
    for number, (said, right) in enumerate(zip(claimed, found, strict=True)):
        if not abs(said - right) <= SAME * max(1.0, abs(right)):
            return f"the reward of its answer {number} is {right:.6g}, and not {said:.6g}"
    return ""


def patience(task: Task, group_size: int) -> float:
    """Seconds for a group from its begin: each call of a sandboxed task, for its prompt and for each answer, may have
    to wait for a process that an audit has."""
    if not isinstance(task, SandboxTask):
        return PATIENCE_S
    return (1 + QUEUE_SHARE) * task.longest_call_s * (1 + group_size)


def threads(spec: JobSpec) -> int:
    """Rewards that are computed side by side: as many as the task has processes."""
    return spec.task.limits.processes or min(4, os.cpu_count() or 1)
