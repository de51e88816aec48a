"""Groups of completions, and batches of them.

Invariant: what is known of a group names who sampled it: what other nodes had begun never counts as sampled here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.protocol.errors import EchoError
from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.engines.base import Completion
from app.tasks.base import Prompt

CUT = "abort"

Begun = Sequence[Completion | None]
"""Of each sample of a group what another node has sampled; None: nothing. Empty: of none of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased items that are generated together; `deadlines` are monotonic seconds by item id."""

    items: Sequence[WorkItem]
    slot: UploadSlot | None
    """None: one is asked for when there is something to put."""
    deadlines: Mapping[str, float]
    begun: Mapping[str, Begun] = field(default_factory=dict)
    """By item id, for those of which there is something to go on from: of another node, or of a try that failed."""
    foreign: Mapping[str, int] = field(default_factory=dict)
    """By item id, how many tokens of that other nodes have sampled."""


@dataclass(frozen=True, slots=True)
class Group:
    """A work item with its samples in order, each with its spans; None: not one token of it."""

    item: WorkItem
    prompt: Prompt
    prompt_ids: Sequence[int]
    deadline: float
    completions: Sequence[Completion | None]
    quantisation: str | None = None
    """How the weights were quantised that it was sampled from."""
    foreign_tokens: int = 0
    """How many of its tokens other nodes have sampled. They stay in the store when this node makes nothing of them."""

    @property
    def whole(self) -> bool:
        """Whether all of it is finished."""
        return all(c is not None and c.finish_reason != CUT for c in self.completions)

    @property
    def finished(self) -> list[Completion]:
        """The samples of a whole group. Raises ValueError for another one."""
        found = [c for c in self.completions if c is not None and c.finish_reason != CUT]
        if len(found) != len(self.completions):
            raise ValueError(f"work item {self.item.id} is not finished")
        return found

    @property
    def tokens(self) -> int:
        """How many tokens of it were sampled, here or elsewhere."""
        return written(self.completions)

    @property
    def own_tokens(self) -> int:
        """How many of them were sampled here."""
        return self.tokens - self.foreign_tokens

    @property
    def oldest_version(self) -> int | None:
        """The version that its staleness counts from; None without a token."""
        versions = [span.version for c in self.completions if c is not None for span in c.spans]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A batch with its groups as they came out; `tokens`: how many of them were sampled here."""

    batch: Batch
    groups: Sequence[Group]
    tokens: int

    @property
    def rollouts(self) -> float:
        """Completions that came to their end, each by the share of it that was sampled here."""
        found = 0.0
        for group in self.groups:
            begun = self.batch.begun.get(group.item.id) or [None] * len(group.completions)
            found += sum(own_share(b, c) for b, c in zip(begun, group.completions, strict=True) if c is not None)
        return found

    @property
    def whole(self) -> list[Group]:
        """Groups that are finished."""
        return [group for group in self.groups if group.whole]

    @property
    def cut(self) -> list[Group]:
        """Groups that are not."""
        return [group for group in self.groups if not group.whole]


@dataclass(frozen=True, slots=True)
class Failed:
    """A batch that failed, with what there is of its groups all the same; `tokens`: how many were sampled here."""

    error: EchoError | RuntimeError
    groups: Sequence[Group]
    tokens: int

    def lost(self, batch: Batch) -> int:
        """How many of them are not in its groups, of which `batch` says what there was before."""
        kept = sum(written(g.completions) - written(batch.begun.get(g.item.id, ())) for g in self.groups)
        return max(0, self.tokens - kept)


def written(samples: Begun) -> int:
    """How many tokens of these samples a policy wrote: what an environment says was sampled by nobody."""
    found = [s for s in samples if s is not None]
    return sum(len(s.token_ids) if s.generated is None else sum(s.generated) for s in found)


def own_share(begun: Completion | None, sample: Completion) -> float:
    """How much of a rollout was sampled here of a sample that was `begun` elsewhere; 0 of one that is not finished: how
    much that is nobody knows."""
    if sample.finish_reason == CUT or not sample.token_ids:
        return 0.0
    return 1.0 if begun is None else 1.0 - min(1.0, len(begun.token_ids) / len(sample.token_ids))
