"""A batch of leased items through an engine that samples whole batches.

Invariant: a group comes out whole, cut, or as far as it was when its batch failed; what is known of a sample is never
sampled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from app.protocol.errors import EchoError, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.work import WorkItem
from app.rollout_agent.engines.base import Completion, Engine, GenRequest
from app.rollout_agent.episodes import Seat, play_rounds
from app.rollout_agent.groups import CUT, Batch, Begun, Failed, Group, Sampled
from app.rollout_agent.joining import join, spanned
from app.rollout_agent.text_side import TextSide

Around = Callable[[], AbstractContextManager[None]]


def sample(
    engine: Engine, text: TextSide, batch: Batch, sampling: SamplingSpec, asking: Around = nullcontext
) -> Sampled | Failed:
    """Generate a batch; runs in the engine's thread, so that the version can't change underneath. `asking`: around
    what the engine does itself.

    Raises what else than an EchoError or a RuntimeError an engine or a task raises: a defect.
    """
    try:
        turns = Turns(engine, text, batch, sampling, asking)
    except (EchoError, RuntimeError) as error:
        return Failed(error, [], 0)
    try:
        turns.play()
    except (EchoError, RuntimeError) as error:
        return Failed(error, turns.groups, turns.tokens)
    return Sampled(batch, turns.groups, turns.tokens)


class Turns:
    """The turns of one batch. What raises in the middle leaves what there was before it.

    Raises Unavailable without a version, BadInput or what the task raises for prompts that can't be made.
    """

    def __init__(
        self, engine: Engine, text: TextSide, batch: Batch, sampling: SamplingSpec, asking: Around = nullcontext
    ) -> None:
        version = engine.version
        if version is None:
            raise Unavailable("no policy version is installed yet")
        self._engine, self._version, self._batch, self._text = engine, version, batch, text
        self._max_tokens, self._asking = sampling.max_tokens, asking
        self.tokens = 0
        """Sampled here so far."""
        prompts, prompt_ids = text.encode(batch.items)
        self._work = list(zip(batch.items, prompts, prompt_ids, strict=True))
        self._begun = {i.id: batch.begun.get(i.id) or [None] * i.group_size for i in batch.items}
        self._how = {item.id: sampling_of(item, sampling) for item in batch.items}
        self._known: list[Completion | None] = [sample for item in batch.items for sample in self._begun[item.id]]

    def play(self) -> None:
        """All samples to their ends, or until the engine is interrupted."""
        requests = [r for i, _, ids in self._work for r in requests_for(i, ids, self._begun[i.id], self._how[i.id])]
        fresh = iter(self._generate(requests))
        first = iter([b if b is not None and b.finish_reason != CUT else join(b, next(fresh)) for b in self._known])
        seats = [
            Seat(ids, i.seed, index, self._how[i.id], self._text.answer(prompt, self._max_tokens), next(first))
            for i, prompt, ids in self._work
            for index in self._of(i)
        ]  # fmt: skip
        play_rounds(self._generate, seats, self._known)

    @property
    def groups(self) -> list[Group]:
        """As far as they are."""
        known = iter(self._known)
        return [
            Group(
                item, prompt, ids, self._batch.deadlines[item.id], [next(known) for _ in self._of(item)],
                self._engine.quantisation, self._batch.foreign.get(item.id, 0),
            )
            for item, prompt, ids in self._work
        ]  # fmt: skip

    def _of(self, item: WorkItem) -> range:
        return range(len(self._begun[item.id]))

    def _generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        if not requests:
            return []
        with self._asking():
            made = self._engine.generate(requests)
        self.tokens += sum(len(completion.token_ids) for completion in made)
        return [spanned(completion, self._version) for completion in made]


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
