"""Rewards computed again.

Invariant: a reward that can't be computed here, or needn't come out the same twice, is nobody's lie; one that should
have been computed and was not is said to be unknown, never taken for right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from app.learner.audit.bounded import Bounded
from app.learner.audit.decide import SAME_REWARD
from app.learner.buffer import Group
from app.protocol.errors import TaskFailed
from app.tasks.base import Prompt, Task, is_deterministic
from app.tasks.sandbox import QUEUE_SHARE, SandboxTask
from app.tasks.scoring import reward_of_turns, turns_of

TIMEOUT_S = 60.0
"""For one answer, as on nodes, of a task that doesn't say how long it may take."""
AT_ONCE = 4


class Rewards:
    """Holds nodes to their rewards. `tokenizer` is nobody else's: it is not safe to use from two threads."""

    def __init__(
        self, task: Task, tokenizer: Any, *, timeout_s: float | None = None, at_once: int | None = None
    ) -> None:
        """`timeout_s`: for one answer, if not as long as its task may take; `at_once`: answers that are computed side
        by side."""
        self._task = task
        self._tokenizer = tokenizer
        self._bounded = Bounded(at_once or min(AT_ONCE, os.cpu_count() or 1), timeout_s or patience_s(task))

    def off(self, group: Group, *, heldout: bool = False) -> float | None:
        """The largest difference between a recorded reward and the one computed again; None if there is none to hold
        it against. `heldout`: its prompt is one of the held-out ones.

        Raises TaskFailed if some could not be computed, and those that could are right.
        """
        if not is_deterministic(self._task):
            return None
        (asked,) = self._bounded.run([partial(self._asked, group, heldout)])
        if isinstance(asked, TaskFailed):
            raise TaskFailed(f"its prompt {asked.detail}")
        prompt, answers = asked
        found = self._bounded.run([partial(reward_of_turns, self._task, prompt, said) for said in answers])
        failed = [again for again in found if isinstance(again, TaskFailed)]
        differences = [
            abs(r.reward - again) / max(1.0, abs(r.reward))
            for r, again in zip(group.rollouts, found, strict=True)
            if not isinstance(again, TaskFailed)
        ]
        worst = max(differences, default=0.0)
        # Who is off in one answer is not excused by another one that can't be computed.
        if failed and worst <= SAME_REWARD:
            raise TaskFailed(f"{len(failed)} of {len(found)} can't be computed here; the first {failed[0].detail}")
        return worst

    def _asked(self, group: Group, heldout: bool) -> tuple[Prompt, Sequence[Sequence[str]]]:
        """What was asked, and the turns of each answer."""
        answers = [turns_of(self._tokenizer, r.completion_ids, r.generated) for r in group.rollouts]
        index = group.rollouts[0].prompt_index
        return (self._task.heldout(index) if heldout else self._task.train(index)), answers

    def close(self) -> None:
        """Begin nothing more; what hangs is left to hang."""
        self._bounded.close()


def patience_s(task: Task) -> float:
    """How long one call may take. A sandboxed one ends by itself, but may have to wait for a free process first."""
    return (1 + QUEUE_SHARE) * task.longest_call_s if isinstance(task, SandboxTask) else TIMEOUT_S
