"""What is left of a batch while it is sampled: parts that are still to come, and what is known of their groups.

Invariant: every item is in one part that waits, or was taken out; what was sampled of it before its part failed is what
the next try goes on from.
"""

from __future__ import annotations

from dataclasses import replace

from app.protocol.work import WorkItem
from app.rollout_agent.groups import Batch, Failed, Group, written
from app.tasks.base import Prompt


class Pieces:
    """Of one batch; `part` is what is sampled now, None before the first and after the last."""

    def __init__(self, batch: Batch) -> None:
        self._waiting = [batch]
        self._known: dict[str, Group] = {}
        self.part: Batch | None = None

    def next(self) -> Batch | None:
        """The next part; the one before is done with."""
        self.part = self._waiting.pop() if self._waiting else None
        return self.part

    def failed(self, part: Batch, how: Failed) -> None:
        """The part failed, and may be gone on with from what there is of it."""
        self._known |= {group.item.id: group for group in how.groups}
        begun = {group.item.id: group.completions for group in how.groups if any(group.completions)}
        self.part = replace(part, begun={**part.begun, **begun})

    def halve(self) -> None:
        """Sample the part that failed in two parts, each of which asks for a place of its own."""
        if self.part is None:
            return
        middle = len(self.part.items) // 2
        for items in (self.part.items[middle:], self.part.items[:middle]):
            deadlines = {item.id: self.part.deadlines[item.id] for item in items}
            self._waiting.append(replace(self.part, items=items, slot=None, deadlines=deadlines))
        self.part = None

    def done(self) -> None:
        """The part is somebody else's to see to."""
        self.part = None

    def drop(self) -> list[Group]:
        """The groups of the part that failed, which is not tried again."""
        part, self.part = self.part, None
        return [] if part is None else self._of(part)

    def rest(self) -> list[Group]:
        """All that is not done with, as far as it is; there is nothing left then."""
        groups = self._groups()
        self._waiting, self.part = [], None
        return groups

    @property
    def own_tokens(self) -> int:
        """How many tokens of what is not done with were sampled here."""
        return sum(group.own_tokens for group in self._groups())

    def _groups(self) -> list[Group]:
        parts = [*([] if self.part is None else [self.part]), *reversed(self._waiting)]
        return [group for part in parts for group in self._of(part)]

    def _of(self, part: Batch) -> list[Group]:
        return [self._known.get(item.id) or _untouched(item, part) for item in part.items]


def _untouched(item: WorkItem, part: Batch) -> Group:
    """A group of which nothing was sampled here, whatever others have: that is in the store, and stays there."""
    begun = part.begun.get(item.id) or [None] * item.group_size
    prompt = Prompt(item.prompt_index, "", {})
    return Group(item, prompt, (), part.deadlines[item.id], begun, foreign_tokens=written(begun))
