"""Rewards computed again.

Invariant: a reward that can't be computed here, or needn't come out the same twice, is nobody's lie.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from app.learner.buffer import Group
from app.tasks.base import Task, is_deterministic
from app.tasks.scoring import reward_of

log = logging.getLogger(__name__)
TIMEOUT_S = 60.0
"""For one group."""


class Rewards:
    """Holds nodes to their rewards. `tokenizer` is nobody else's: it is not safe to use from two threads."""

    def __init__(self, task: Task, tokenizer: Any, *, timeout_s: float = TIMEOUT_S) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="audit-rewards")
        self._stuck: Future[float] | None = None

    def off(self, group: Group, *, heldout: bool = False) -> float | None:
        """The largest difference between a recorded reward and the one computed again; None if there is none to hold
        it against. `heldout`: its prompt is one of the held-out ones."""
        if not is_deterministic(self._task) or (self._stuck is not None and not self._stuck.done()):
            return None
        future = self._pool.submit(self._off, group, heldout)
        try:
            error = future.exception(self._timeout_s)
        except TimeoutError:
            log.warning("the reward of work item %s takes longer than %.0f s here", group.work_item, self._timeout_s)
            self._stuck = future
            return None
        if error is not None:
            # A task is a plug-in and may raise anything.
            log.warning("the reward of work item %s can't be computed here: %r", group.work_item, error)
            return None
        return future.result()

    def _off(self, group: Group, heldout: bool) -> float:
        index = group.rollouts[0].prompt_index
        prompt = self._task.heldout(index) if heldout else self._task.train(index)
        return max(
            abs(r.reward - reward_of(self._task, prompt, self._tokenizer, r.completion_ids, r.generated))
            / max(1.0, abs(r.reward))
            for r in group.rollouts
        )

    def close(self) -> None:
        """Begin nothing more; what hangs is left to hang."""
        self._pool.shutdown(wait=False, cancel_futures=True)
