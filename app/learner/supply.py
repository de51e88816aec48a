"""Groups that can't be trained on: they are told, counted, and a reason to give up when hardly anything else comes.

Invariant: every dropped group is reported exactly once as dropped, with a step or, while the learner waits, without
one; the record of the next step counts all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from app.learner.buffer import ReplayBuffer
from app.learner.outbox import Directives, Outbox
from app.protocol.errors import LearnerError
from app.protocol.learner import DroppedGroup, Drops

_FAULTS = ("invalid_", "audits_suspect", "audits_failed")
"""What the names of metrics begin with that count groups which were refused."""
_HARDLY = 10
"""Fewer usable groups than one in so many."""


class Supply:
    """What was dropped since the last step. For the loop's thread."""

    def __init__(self, buffer: ReplayBuffer, outbox: Outbox, directives: Directives, *, budget: int) -> None:
        """`budget`: S at the last step."""
        self._buffer = buffer
        self._outbox = outbox
        self._directives = directives
        self._budget = budget
        self.dropped: list[DroppedGroup] = []
        """Not reported yet."""
        self.told: list[DroppedGroup] = []
        """Reported before there was a batch."""
        self._told_dead = 0
        """Those of `told` that speak of a fault."""

    def evict(self, t: int) -> None:
        """Drop what is over the budget at v_t."""
        self.dropped += self._buffer.evict(t, self._directives.current().staleness_budget)

    def tell(self, t: int) -> None:
        """Report what can't be trained on without waiting for a step: there is room for others at once."""
        self.evict(t)
        dropped, self.dropped = self.dropped, []
        if dropped:
            self.told += dropped
            self._told_dead += self._dead(dropped)
            self._outbox.put(Drops(step=t, dropped=dropped))

    def reported(self, budget: int) -> None:
        """A step has reported all of it. What is under way was admitted under `budget`, the S of that step."""
        self.dropped, self.told, self._told_dead = [], [], 0
        self._budget = budget

    def check(self, t: int, published: int, prompts: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Raise LearnerError when so many groups were refused that there is no use in waiting for others.

        Admission lets at most (S + v − t + 1) · prompts groups be ahead of the learner, v the newest version
        (`published`), and makes up for those that are dead. When more than that were since the last step, and hardly
        any can be trained on, it only burns the fleet's money.
        """
        dead = self._buffer.unreported + self._dead(self.dropped) + self._told_dead
        if len(self._buffer) * _HARDLY >= dead:
            return
        margin = self._directives.current().staleness_budget + published - t + 1
        if 0 < margin * prompts < dead:
            told = {name: n for name, n in metrics().items() if name.startswith(_FAULTS)}
            reasons = ", ".join(f"{n:.0f} × {name}" for name, n in told.items()) or "stale"
            raise LearnerError(
                f"{dead} groups since step {t} can't be trained on ({reasons}), and hardly any can; "
                "do nodes and learner have the same model files and task package?"
            )

    def _dead(self, dropped: Sequence[DroppedGroup]) -> int:
        """How many of these speak of a fault. That a lower S makes old groups stale is none."""
        lowered = self._directives.current().staleness_budget < self._budget
        return sum(d.reason != "stale" or not lowered for d in dropped)
