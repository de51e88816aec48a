"""One batch of work on its way: leased, generated, scored, made into a file.

Invariant: a batch is sampled under one policy version; a work item goes into the file with its whole group or not at
all; a reward that could not be computed is never a number.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from app.protocol import trajectory
from app.protocol.errors import EchoError, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import CommitRequest, UploadSlot, WorkItem
from app.rollout_agent.engines.base import Completion, Engine, GenRequest
from app.tasks.base import Prompt, Task
from app.tasks.prompts import decode, encode_prompt

log = logging.getLogger(__name__)

REWARD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased items that are generated together; `deadlines` are monotonic seconds by item id."""

    items: Sequence[WorkItem]
    slot: UploadSlot
    deadlines: Mapping[str, float]

    @property
    def last_deadline(self) -> float:
        """When the last of its leases ends."""
        return max(self.deadlines.values())


@dataclass(frozen=True, slots=True)
class Sampled:
    """A batch with its prompts and completions, all of `version`; `groups[i]` belongs to `batch.items[i]`."""

    batch: Batch
    version: int
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[Sequence[int]]
    groups: Sequence[Sequence[Completion]]
    quantisation: str | None = None
    """How the weights of `version` were quantised that it was sampled from."""

    @property
    def rollouts(self) -> int:
        """Number of completions."""
        return sum(len(group) for group in self.groups)

    @property
    def tokens(self) -> int:
        """Number of completion tokens."""
        return sum(len(completion.token_ids) for group in self.groups for completion in group)


@dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """A file ready to be put and committed."""

    data: bytes = field(repr=False)
    request: CommitRequest


class TextSide:
    """Tokenizer and task: text ⇄ ids and rewards. One lock guards the tokenizer, which is not thread-safe."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, items: Sequence[WorkItem]) -> tuple[list[Prompt], list[list[int]]]:
        """Prompts of the items, and their token ids. Raises BadInput for an index that the task does not have."""
        prompts = [
            (self._task.heldout if item.split == "heldout" else self._task.train)(item.prompt_index) for item in items
        ]
        with self._lock:
            return prompts, [encode_prompt(self._tokenizer, prompt) for prompt in prompts]

    def rewards(self, prompt: Prompt, group: Sequence[Completion]) -> list[float]:
        """The rewards of a group. Raises whatever the task raises, and ValueError for one that is not finite."""
        with self._lock:
            texts = [decode(self._tokenizer, completion.token_ids) for completion in group]
        rewards = [float(self._task.reward(prompt, text)) for text in texts]
        if not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(f"the task's reward is not finite: {rewards}")
        return rewards


def sample(engine: Engine, text: TextSide, batch: Batch, sampling: SamplingSpec) -> Sampled:
    """Generate a batch; runs in the engine's thread, so that the version can't change underneath."""
    version = engine.version
    if version is None:
        raise Unavailable("no policy version is installed yet")
    prompts, prompt_ids = text.encode(batch.items)
    requests = [
        GenRequest(prompt_ids=ids, n=item.group_size, seed=item.seed, sampling=_sampling(item, sampling))
        for item, ids in zip(batch.items, prompt_ids, strict=True)
    ]
    completions = iter(engine.generate(requests))
    groups = [[next(completions) for _ in range(item.group_size)] for item in batch.items]
    return Sampled(batch, version, prompts, prompt_ids, groups, engine.quantisation)


def _sampling(item: WorkItem, sampling: SamplingSpec) -> SamplingSpec:
    return sampling if item.temperature is None else sampling.model_copy(update={"temperature": item.temperature})


async def score(text: TextSide, sampled: Sampled, pool: Executor) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Rewards by work item, and what went wrong by work item. Groups are scored concurrently, each with a timeout."""
    loop = asyncio.get_running_loop()

    async def one(prompt: Prompt, group: Sequence[Completion]) -> list[float]:
        async with asyncio.timeout(REWARD_TIMEOUT_S):
            return await loop.run_in_executor(pool, text.rewards, prompt, group)

    outcomes = await asyncio.gather(
        *(one(prompt, group) for prompt, group in zip(sampled.prompts, sampled.groups, strict=True)),
        return_exceptions=True,
    )
    rewards: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for item, outcome in zip(sampled.batch.items, outcomes, strict=True):
        if isinstance(outcome, Exception):
            # A task is a plug-in and may raise anything; its detail goes into the report.
            failed[item.id] = outcome.detail if isinstance(outcome, EchoError) else repr(outcome)[:500]
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            rewards[item.id] = outcome
    return rewards, failed


def to_file(sampled: Sampled, rewards: Mapping[str, Sequence[float]]) -> TrajectoryFile:
    """The trajectory file of the items that have rewards; there must be at least one."""
    rows = [
        trajectory.Rollout(
            work_item=item.id,
            prompt_index=item.prompt_index,
            sample_index=index,
            prompt_ids=prompt_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            span_versions=[sampled.version],
            span_starts=[0],
            reward=rewards[item.id][index],
            finish_reason=completion.finish_reason,
            quantisation=sampled.quantisation,
        )
        for item, prompt_ids, group in zip(sampled.batch.items, sampled.prompt_ids, sampled.groups, strict=True)
        if item.id in rewards
        for index, completion in enumerate(group)
    ]
    data = trajectory.encode(rows)
    request = CommitRequest(
        key=sampled.batch.slot.key, size=len(data), blake3=blake3(data).hexdigest(), work_items=list(rewards)
    )
    return TrajectoryFile(data, request)
