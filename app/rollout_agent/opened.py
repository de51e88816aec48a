"""Groups between their lease and the file: what is known of them, and when they are let go.

Invariant: what is known of a sample only grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.protocol.errors import Unavailable
from app.protocol.work import WorkItem
from app.rollout_agent.engines.base import Completion
from app.rollout_agent.groups import CUT, Begun, Group, written
from app.rollout_agent.joining import oldest
from app.tasks.base import Prompt


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
    pending: int = 0
    """How many samples are not finished."""
    task: asyncio.Task[None] | None = None
    foreign_tokens: int = 0
    """How many tokens of it other nodes have sampled."""

    def __post_init__(self) -> None:
        self.take_up([None] * self.item.group_size)

    @property
    def missing(self) -> list[int]:
        """Indices of the samples that are not finished."""
        return [i for i, sample in enumerate(self.samples) if not _ended(sample)]

    @property
    def tokens(self) -> int:
        """Tokens that are known of it and were sampled here: what others began is in the store, and not lost."""
        return written(self.samples) - self.foreign_tokens

    @property
    def told(self) -> Prompt:
        """The prompt. Raises Unavailable before it is known."""
        if self.prompt is None:
            raise Unavailable(f"the prompt of work item {self.item.id} is not known yet")
        return self.prompt

    def take_up(self, begun: Begun) -> None:
        """Go on from what another node has sampled."""
        self.samples = list(begun)
        self.foreign_tokens = written(begun)
        self.pending = len(self.missing)

    def keep(self, index: int, sample: Completion) -> None:
        """What is known of one sample now."""
        self.pending += _ended(self.samples[index]) - _ended(sample)
        self.samples[index] = sample

    def oldest_version(self) -> int | None:
        """The oldest version that has, or will have, a part in it."""
        known = [v for v in (oldest(s) for s in self.samples if s is not None) if v is not None]
        untouched = any(s is None for s in self.samples) and self.version is not None
        return min([*known, self.version] if untouched and self.version is not None else known, default=None)

    def group(self, quantisation: str | None) -> Group:
        """As it stands."""
        prompt = self.prompt or Prompt(self.item.prompt_index, "", {})
        return Group(
            self.item, prompt, self.prompt_ids, self.deadline, tuple(self.samples), quantisation, self.foreign_tokens
        )


def is_stale(opened: Open, now: float, floor: int | None, hopeless_after_s: float) -> bool:
    """Whether a group is not worth going on with at `now`: too old for the learner, or its lease long over."""
    version = opened.oldest_version()
    # An evaluation is of an old version if need be.
    too_old = opened.item.split == "train" and floor is not None and version is not None and version < floor
    return too_old or now > opened.deadline + hopeless_after_s


def _ended(sample: Completion | None) -> bool:
    return sample is not None and sample.finish_reason != CUT
