"""Work on its way: leased, sampled, scored, made into a file.

Invariant: a work item goes into a file with its whole group or not at all; a reward that could not be computed is never
a number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from app.protocol import trajectory
from app.protocol.errors import EchoError, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.pruning import Prune, informative
from app.protocol.work import CommitRequest, UploadSlot, WorkItem
from app.rollout_agent.engines.base import Completion, Engine, GenRequest
from app.rollout_agent.episodes import Answer, Seat, answered, play_rounds
from app.rollout_agent.joining import join, spanned
from app.rollout_agent.locked import LockedTokenizer
from app.tasks.base import Prompt, Task
from app.tasks.prompts import encode_prompt
from app.tasks.sandbox import SandboxTask
from app.tasks.scoring import reward_of

log = logging.getLogger(__name__)

REWARD_TIMEOUT_S = 60.0
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
    """By item id, for those that another node has begun."""

    @property
    def last_deadline(self) -> float:
        """When the last of its leases ends."""
        return max(self.deadlines.values())


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
        """Number of completion tokens."""
        return sum(len(c.token_ids) for c in self.completions if c is not None)

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


def own_share(begun: Completion | None, sample: Completion) -> float:
    """How much of a rollout was sampled here of a sample that was `begun` elsewhere; 0 of one that is not finished: how
    much that is nobody knows."""
    if sample.finish_reason == CUT or not sample.token_ids:
        return 0.0
    return 1.0 if begun is None else 1.0 - min(1.0, len(begun.token_ids) / len(sample.token_ids))


@dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """A file ready to be put and committed."""

    data: bytes = field(repr=False)
    request: CommitRequest

    def under(self, key: str) -> TrajectoryFile:
        """The same file under another key."""
        return TrajectoryFile(self.data, self.request.model_copy(update={"key": key}))


class TextSide:
    """Tokenizer and task: text ⇄ ids and rewards. May be used from several threads.

    `scores` False: rewards are somebody else's matter, and 0 here. `at_once`: rewards that are computed side by side.
    """

    def __init__(self, task: Task, tokenizer: Any, *, scores: bool = True, at_once: int = 4) -> None:
        self._task = task
        self._tokenizer = LockedTokenizer(tokenizer)
        self.scores = scores
        self.gate = asyncio.Semaphore(at_once)
        """Who holds it may compute one: its time then counts from when it really begins."""
        self.reward_timeout_s = task.longest_call_s if isinstance(task, SandboxTask) else REWARD_TIMEOUT_S

    def encode(self, items: Sequence[WorkItem]) -> tuple[list[Prompt], list[list[int]]]:
        """Prompts of the items, and their token ids. Raises BadInput for an index that the task does not have."""
        prompts = [
            (self._task.heldout if item.split == "heldout" else self._task.train)(item.prompt_index) for item in items
        ]
        return prompts, [encode_prompt(self._tokenizer, prompt) for prompt in prompts]

    @property
    def multi_turn(self) -> bool:
        """Whether the task has an environment that answers."""
        return hasattr(self._task, "respond")

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """What the task's environment makes of an episode after this prompt; nothing, of a task with one turn."""

        def answer(episode: Completion) -> Completion:
            return answered(self._task, self._tokenizer, prompt, episode, max_tokens)

        return answer

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of a sample. Raises whatever the task raises, and TaskFailed for one that is not finite."""
        return reward_of(self._task, prompt, self._tokenizer, completion.token_ids, completion.generated)


def sample(engine: Engine, text: TextSide, batch: Batch, sampling: SamplingSpec) -> Sampled:
    """Generate a batch; runs in the engine's thread, so that the version can't change underneath."""
    version = engine.version
    if version is None:
        raise Unavailable("no policy version is installed yet")
    tokens = 0

    def generate(requests: Sequence[GenRequest]) -> list[Completion]:
        nonlocal tokens
        fresh = [spanned(completion, version) for completion in (engine.generate(requests) if requests else [])]
        tokens += sum(len(completion.token_ids) for completion in fresh)
        return fresh

    prompts, prompt_ids = text.encode(batch.items)
    work = list(zip(batch.items, prompts, prompt_ids, strict=True))
    begun = {item.id: batch.begun.get(item.id) or [None] * item.group_size for item in batch.items}
    how = {item.id: sampling_of(item, sampling) for item in batch.items}
    requests = [r for item, _, ids in work for r in requests_for(item, ids, begun[item.id], how[item.id])]
    fresh = iter(generate(requests))
    seats = [
        Seat(
            ids, item.seed, index, how[item.id], text.answer(prompt, sampling.max_tokens),
            b if b is not None and b.finish_reason != CUT else join(b, next(fresh)),
        )
        for item, prompt, ids in work
        for index, b in enumerate(begun[item.id])
    ]  # fmt: skip
    episodes = iter(play_rounds(generate, seats))
    groups = [
        Group(
            item, prompt, ids, batch.deadlines[item.id], [next(episodes) for _ in begun[item.id]], engine.quantisation
        )
        for item, prompt, ids in work
    ]  # fmt: skip
    return Sampled(batch, groups, tokens)


def requests_for(item: WorkItem, prompt_ids: Sequence[int], begun: Begun, sampling: SamplingSpec) -> list[GenRequest]:
    """What an engine has to sample of a group: all, or what is missing of the samples that were begun."""
    if not any(begun):
        return [GenRequest(prompt_ids, item.group_size, item.seed, sampling)]
    requests = []
    for index, sample in enumerate(begun):
        if sample is not None and sample.finish_reason != CUT:
            continue
        prefix = [] if sample is None else sample.token_ids
        left = sampling.model_copy(update={"max_tokens": sampling.max_tokens - len(prefix)})
        requests.append(GenRequest([*prompt_ids, *prefix], 1, item.seed, left, first=index, start=len(prefix)))
    return requests


def sampling_of(item: WorkItem, sampling: SamplingSpec) -> SamplingSpec:
    """How an item is sampled: as the job says, at its own temperature if it has one."""
    return sampling if item.temperature is None else sampling.model_copy(update={"temperature": item.temperature})


async def score(
    text: TextSide, groups: Sequence[Group], pool: Executor
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Rewards by work item, and what went wrong by work item. All are computed concurrently, each with a timeout."""
    loop = asyncio.get_running_loop()

    async def reward(prompt: Prompt, completion: Completion) -> float:
        async with text.gate, asyncio.timeout(text.reward_timeout_s):
            return await loop.run_in_executor(pool, text.reward, prompt, completion)

    async def one(group: Group) -> list[float]:
        if not text.scores:
            return [0.0] * len(group.finished)
        return list(await asyncio.gather(*(reward(group.prompt, sample) for sample in group.finished)))

    outcomes = await asyncio.gather(*(one(group) for group in groups), return_exceptions=True)
    rewards: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for group, outcome in zip(groups, outcomes, strict=True):
        if isinstance(outcome, Exception):
            # A task is a plug-in and may raise anything; its detail goes into the report.
            failed[group.item.id] = outcome.detail if isinstance(outcome, EchoError) else repr(outcome)[:500]
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            rewards[group.item.id] = outcome
    return rewards, failed


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
