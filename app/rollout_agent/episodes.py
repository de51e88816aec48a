"""Episodes of a multi-turn task: the policy writes, the environment answers, until the task says that it is over.

Invariant: an episode is one completion in which `generated` marks what the policy wrote; what the environment wrote has
the log-prob 0 and counts toward `max_tokens`; an episode never ends with it, so that each one that is cut (`abort`)
goes on by sampling, here or elsewhere. A task with one turn comes through unchanged.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from app.protocol.errors import EchoError
from app.protocol.job import SamplingSpec
from app.rollout_agent.engines.base import Completion, GenRequest, Interrupted
from app.rollout_agent.joining import join
from app.tasks.base import Prompt, Task
from app.tasks.scoring import reply_of

Sampler = Callable[[Sequence[int], int, int], Awaitable[Completion]]
"""Token ids to continue, how many of them are the completion's, how many may come → a piece with its spans."""
Answer = Callable[[Completion], Completion]
"""`answered` of one episode. It may block: a task's own code runs in it."""


def answered(task: Task, tokenizer: Any, prompt: Prompt, episode: Completion, max_tokens: int) -> Completion:
    """The episode after the environment has had its say: with its words at the end and `abort`, since the policy goes
    on; with `length` if they and one more token don't fit; unchanged if it is over or was cut itself.

    Raises BadInput for a reply without tokens, and whatever the task raises.
    """
    if episode.finish_reason != "stop":
        return episode
    ids = reply_of(task, prompt, tokenizer, episode.token_ids, episode.generated)
    if ids is None:
        return episode
    marks = [True] * len(episode.token_ids) if episode.generated is None else list(episode.generated)
    if len(marks) + len(ids) >= max_tokens:
        return dataclasses.replace(episode, finish_reason="length")
    return Completion(
        token_ids=[*episode.token_ids, *ids],
        logprobs=[*episode.logprobs, *([0.0] * len(ids))],
        finish_reason="abort",
        spans=episode.spans,
        generated=[*marks, *([False] * len(ids))],
        proofs=episode.proofs,
    )


async def play(
    sample: Sampler,
    answer: Answer,
    environments: Executor,
    prompt_ids: Sequence[int],
    max_tokens: int,
    begun: Completion | None = None,
) -> Completion:
    """One episode to its end, or until the sampler cuts it: then it comes back as `abort`. `begun`: one that was cut.
    `answer` is called in `environments`.

    Raises what `sample` and `answer` raise.
    """
    episode = begun
    while True:
        start = 0 if episode is None else len(episode.token_ids)
        so_far = [] if episode is None else episode.token_ids
        piece = await sample([*prompt_ids, *so_far], start, max_tokens - start)
        episode = join(episode, piece)
        if piece.finish_reason != "stop":
            return episode
        episode = await asyncio.get_running_loop().run_in_executor(environments, answer, episode)
        if episode.finish_reason != "abort":
            return episode


@dataclass(frozen=True, slots=True)
class Seat:
    """One sample of a group in a batch: what is needed to go on with it. `index`: its number in its group."""

    prompt_ids: Sequence[int]
    seed: int
    index: int
    sampling: SamplingSpec
    answer: Answer
    episode: Completion
    """As the engine gave it, not answered yet."""


def play_rounds(
    generate: Callable[[Sequence[GenRequest]], Sequence[Completion]],
    seats: Sequence[Seat],
    known: list[Completion | None] | None = None,
) -> list[Completion]:
    """All episodes to their ends, in rounds of one batch each over those that go on; cut ones stay cut.

    `generate` gives each completion its spans. Raises what it and the answers raise; after `Interrupted` they are cut.
    `known` is kept up to date meanwhile, so that whoever catches an error has what may be gone on with: an episode
    that waits for its answer is there as it was before its newest piece.
    """
    episodes = [seat.episode for seat in seats]
    known = known if known is not None else [None] * len(seats)
    running = _settled(episodes, known, range(len(seats)))
    while running:
        _answer(seats, episodes, known, running)
        running = [i for i in running if episodes[i].finish_reason == "abort"]
        if not running:
            break
        try:
            pieces = generate([_request(seats[i], episodes[i]) for i in running])
        except Interrupted:
            break
        for i, piece in zip(running, pieces, strict=True):
            episodes[i] = join(episodes[i], piece)
        running = _settled(episodes, known, running)
    return episodes


def _settled(episodes: Sequence[Completion], known: list[Completion | None], of: Iterable[int]) -> list[int]:
    """Take note of those that wait for no answer; the others."""
    waiting = []
    for i in of:
        if episodes[i].finish_reason == "stop":
            waiting.append(i)
        else:
            known[i] = episodes[i]
    return waiting


def _answer(
    seats: Sequence[Seat], episodes: list[Completion], known: list[Completion | None], running: Sequence[int]
) -> None:
    """Ask the environment about each. The first error is raised once all have been asked."""
    failure: EchoError | RuntimeError | None = None
    for i in running:
        try:
            known[i] = episodes[i] = seats[i].answer(episodes[i])
        except (EchoError, RuntimeError) as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _request(seat: Seat, episode: Completion) -> GenRequest:
    done = len(episode.token_ids)
    left = seat.sampling.model_copy(update={"max_tokens": seat.sampling.max_tokens - done})
    return GenRequest([*seat.prompt_ids, *episode.token_ids], 1, seat.seed, left, first=seat.index, start=done)
