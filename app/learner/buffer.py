"""The replay buffer: whole groups, oldest admissible first.

Invariant: a group that `take` returns satisfies t − x ≤ S at that moment, x the version of its oldest token; a work
item leaves the buffer once, either to be trained on or with a reason.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.protocol.learner import DroppedGroup
from app.protocol.trajectory import Rollout

REMEMBERED = 200_000
"""Work items that are remembered to refuse a second copy."""


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one work item, sorted by sample index."""

    work_item: str
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int:
        """The version that staleness counts from."""
        return min(r.oldest_version for r in self.rollouts)

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(len(r.completion_ids) for r in self.rollouts)


def admissible(version: int, t: int, staleness_budget: int) -> bool:
    """Whether a rollout with its oldest token of v_version may be trained on by a learner that is at v_t."""
    return t - version <= staleness_budget


class ReplayBuffer:
    """Thread-safe. `t` is always the learner's current version: its number of completed steps."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, int, Group]] = []
        self._arrived = 0
        self._dropped: list[DroppedGroup] = []
        self._known: set[str] = set()
        self._order: deque[str] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return len(self._groups)

    def add(self, group: Group) -> bool:
        """Take a group in; False if this work item has been here before."""
        with self._changed:
            if not self._remember(group.work_item):
                return False
            self._groups.append((group.oldest_version, self._arrived, group))
            self._groups.sort(key=lambda entry: entry[:2])
            self._arrived += 1
            self._changed.notify_all()
            return True

    def reject(self, work_item: str, reason: Literal["stale", "invalid"]) -> None:
        """Note that a group will never be trained on; `take` and `evict` hand the note out."""
        with self._changed:
            if self._remember(work_item):
                self._dropped.append(DroppedGroup(work_item=work_item, reason=reason))

    @property
    def unreported(self) -> int:
        """Groups that were dropped or rejected and not handed out to be reported yet."""
        with self._changed:
            return len(self._dropped)

    def note(self, work_items: Iterable[str]) -> None:
        """These were trained on or dropped already: refuse them when they come again."""
        with self._changed:
            for item in work_items:
                self._remember(item)

    def ready(self, t: int, staleness_budget: int, prompts: int) -> bool:
        """Whether at least `prompts` groups are admissible at v_t."""
        with self._changed:
            return self._admissible(t, staleness_budget) >= prompts

    def wait(self, t: int, staleness_budget: int, prompts: int, timeout_s: float) -> bool:
        """Like `ready`, but waits for arrivals up to `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._admissible(t, staleness_budget) >= prompts, timeout_s)

    def take(self, t: int, staleness_budget: int, prompts: int) -> tuple[list[Group], list[DroppedGroup]]:
        """Remove the `prompts` oldest admissible groups (equal versions in order of arrival), and what is dropped.

        With fewer than `prompts` admissible groups it returns no group; what is over budget is dropped all the same.
        """
        with self._changed:
            self._drop_stale(t, staleness_budget)
            taken: list[Group] = []
            if len(self._groups) >= prompts:
                taken = [group for _, _, group in self._groups[:prompts]]
                del self._groups[:prompts]
            return taken, self._hand_out()

    def evict(self, t: int, staleness_budget: int) -> list[DroppedGroup]:
        """Drop what is over budget at v_t and return it together with what was rejected since the last call."""
        with self._changed:
            self._drop_stale(t, staleness_budget)
            return self._hand_out()

    def _admissible(self, t: int, staleness_budget: int) -> int:
        return sum(admissible(version, t, staleness_budget) for version, _, _ in self._groups)

    def _drop_stale(self, t: int, staleness_budget: int) -> None:
        stale = [g for version, _, g in self._groups if not admissible(version, t, staleness_budget)]
        self._dropped += [DroppedGroup(work_item=g.work_item, reason="stale") for g in stale]
        del self._groups[: len(stale)]

    def _hand_out(self) -> list[DroppedGroup]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def _remember(self, work_item: str) -> bool:
        if work_item in self._known:
            return False
        self._known.add(work_item)
        self._order.append(work_item)
        if len(self._order) > REMEMBERED:
            self._known.discard(self._order.popleft())
        return True


def lag_histogram(groups: Sequence[Group], t: int) -> dict[int, int]:
    """Version lag t − x → number of rollouts, x the oldest version of each rollout."""
    lags: dict[int, int] = {}
    for group in groups:
        for rollout in group.rollouts:
            lag = t - rollout.oldest_version
            lags[lag] = lags.get(lag, 0) + 1
    return dict(sorted(lags.items()))
