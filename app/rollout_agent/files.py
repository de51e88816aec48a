"""Groups as trajectory files.

Invariant: a work item goes into a file with its whole group or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from app.protocol import trajectory
from app.protocol.pruning import Prune, informative
from app.protocol.work import CommitRequest
from app.rollout_agent.groups import Group


@dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """A file ready to be put and committed."""

    data: bytes = field(repr=False)
    request: CommitRequest

    def under(self, key: str) -> TrajectoryFile:
        """The same file under another key."""
        return TrajectoryFile(self.data, self.request.model_copy(update={"key": key}))


def rows_of(group: Group, rewards: Sequence[float]) -> list[trajectory.Rollout]:
    """The samples that there are of a group, as rows; `rewards` by sample index."""
    return [
        trajectory.Rollout(
            work_item=group.item.id,
            prompt_index=group.item.prompt_index,
            sample_index=index,
            prompt_ids=group.prompt_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            span_versions=[span.version for span in completion.spans],
            span_starts=[span.start for span in completion.spans],
            reward=rewards[index],
            finish_reason=completion.finish_reason,
            quantisation=group.quantisation,
            generated=completion.generated,
            proofs=completion.proofs,
        )
        for index, completion in enumerate(group.completions)
        if completion is not None and completion.token_ids
    ]


def sent(group: Group, rewards: Sequence[float], prune: Prune | None) -> list[trajectory.Rollout]:
    """The rows of a whole group that go into its file: all, or of prompts to train on those worth sending."""
    left = set(informative(rewards, prune if group.item.split == "train" else None))
    return [row for row in rows_of(group, rewards) if row.sample_index in left]


def to_file(
    groups: Sequence[Group], rewards: Mapping[str, Sequence[float]], key: str, prune: Prune | None = None
) -> TrajectoryFile:
    """The trajectory file of the groups that have rewards; there must be at least one."""
    scored = [group for group in groups if group.item.id in rewards]
    data = trajectory.encode([row for group in scored for row in sent(group, rewards[group.item.id], prune)])
    return file_of(data, key, [group.item.id for group in scored])


def file_of(data: bytes, key: str, items: Sequence[str]) -> TrajectoryFile:
    """A file with the request that commits it."""
    request = CommitRequest(key=key, size=len(data), blake3=blake3(data).hexdigest(), work_items=list(items))
    return TrajectoryFile(data, request)
