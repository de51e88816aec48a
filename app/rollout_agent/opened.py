"""Groups between their lease and the file: what is known of them, when they are let go, which share a file.

Invariant: what is known of a sample only grows; a group whose lease is over, or of another kind, never shares a file
with others, since a file is refused as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.protocol.errors import Unavailable
from app.protocol.node import WasteReason, WorkItem
from app.rollout_agent.batch import CUT, Begun, Group
from app.rollout_agent.delivery import Scored
from app.rollout_agent.engines.base import Completion
from app.rollout_agent.joining import oldest
from app.tasks.base import Prompt

Verdict = WasteReason


@dataclass(slots=True)
class Open:
    """A group that is being worked on. `deadline`, `opened_at`: monotonic seconds; `version`: in force at the lease."""

    item: WorkItem
    deadline: float
    opened_at: float
    version: int | None
    prompt: Prompt | None = None
    prompt_ids: Sequence[int] = ()
    samples: list[Completion | None] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.samples = [None] * self.item.group_size

    @property
    def missing(self) -> list[int]:
        """Indices of the samples that are not finished."""
        return [i for i, s in enumerate(self.samples) if s is None or s.finish_reason == CUT]

    @property
    def pending(self) -> int:
        """How many these are."""
        return len(self.missing)

    @property
    def tokens(self) -> int:
        """Tokens that are known of it."""
        return sum(len(s.token_ids) for s in self.samples if s is not None)

    @property
    def told(self) -> Prompt:
        """The prompt. Raises Unavailable before it is known."""
        if self.prompt is None:
            raise Unavailable(f"the prompt of work item {self.item.id} is not known yet")
        return self.prompt

    def take_up(self, begun: Begun) -> None:
        """Go on from what another node has sampled."""
        self.samples = list(begun)

    def keeper(self, index: int) -> Callable[[Completion], None]:
        """What takes in news of one sample."""

        def keep(sample: Completion) -> None:
            self.samples[index] = sample

        return keep

    def oldest_version(self) -> int | None:
        """The oldest version that has, or will have, a part in it."""
        known = [v for v in (oldest(s) for s in self.samples if s is not None) if v is not None]
        untouched = any(s is None for s in self.samples) and self.version is not None
        return min([*known, self.version] if untouched and self.version is not None else known, default=None)

    def group(self, quantisation: str | None) -> Group:
        """As it stands."""
        prompt = self.prompt or Prompt(self.item.prompt_index, "", {})
        return Group(self.item, prompt, self.prompt_ids, self.deadline, tuple(self.samples), quantisation)


def judge(opened: Open, now: float, floor: int | None, hopeless_after_s: float) -> Verdict | None:
    """Why a group is not worth going on with at `now`: too old for the learner, or its lease long over; None: it is."""
    version = opened.oldest_version()
    too_old = floor is not None and version is not None and version < floor
    return "stale" if too_old or now > opened.deadline + hopeless_after_s else None


def shareable(ready: Sequence[Scored], most: int | None, now: float) -> list[Scored]:
    """The first group that waits, and those that may go into one file with it, at most `most` in all."""
    first = ready[0].group
    alike = [first.item.split, first.quantisation]

    def fits(scored: Scored) -> bool:
        group = scored.group
        return group.deadline > now and [group.item.split, group.quantisation] == alike

    if first.deadline <= now:
        return [ready[0]]
    return [ready[0], *filter(fits, ready[1:])][: most or None]
