"""Held-out reward.

Invariant: an evaluation of the same weights, task and seed gives the same number, and leaves no trace in the training:
it draws from a generator of its own and changes no weight. Of several ranks only rank 0 knows the task: each reply of
an environment is asked for once, and each reward computed once.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from app.learner.parallel.messages import Sampling
from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.sampling import Completion, eos_ids, sample
from app.protocol.errors import BadInput, EchoError, TaskFailed
from app.protocol.job import JobSpec, SamplingSpec
from app.tasks.base import Prompt, Task
from app.tasks.prompts import encode_prompt
from app.tasks.scoring import reply_of, reward_of_turns, turns_of

log = logging.getLogger(__name__)
_THREADS = 4
_SALT = 0x65766C
"""Keeps the draws apart from any other use of the job's seed."""


@dataclass(slots=True)
class _Answer:
    """An answer as far as it has come; `marks`: which tokens the policy wrote; `ended`: it has ended its turn;
    `failed`: the environment has."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)
    ended: bool = False
    failed: bool = False

    def add(self, ids: Sequence[int], *, own: bool) -> None:
        self.ids.extend(ids)
        self.marks.extend([own] * len(ids))


class Sampler:
    """Answers at the temperature at which nodes sample, nothing truncated. With several ranks a call is collective, for
    a forward pass takes them all: rank 0 says to what prompts, and its draws are everybody's."""

    def __init__(self, model: Any, tokenizer: Any, sampling: SamplingSpec, ranks: Ranks = ALONE) -> None:
        self._model = model
        self._temperature = sampling.temperature
        self._eos = eos_ids(model, tokenizer)
        self._ranks = ranks

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, generator: torch.Generator | None = None
    ) -> list[Completion]:
        """One answer to each prompt, in order. `generator` is drawn from; other ranks than 0 need none."""
        asked = Sampling(prompts=[list(p) for p in prompts], max_tokens=max_tokens)
        self._ranks.announce("sample", asked.model_dump_json().encode())
        return sample(
            self._model,
            prompts,
            max_tokens=max_tokens,
            temperature=self._temperature,
            eos=self._eos,
            generator=generator or torch.Generator(device=self._model.device),
            agree=self._ranks.first,
        )


class Evaluator:
    """One answer to each of the first `learner.eval_prompts` held-out prompts; of several ranks for rank 0."""

    def __init__(self, model: Any, tokenizer: Any, task: Task, spec: JobSpec, ranks: Ranks = ALONE) -> None:
        self._sampled = Sampler(model, tokenizer, spec.sampling, ranks)
        self._model = model
        self._tokenizer = tokenizer
        self._task = task
        self._spec = spec
        self.prompts = min(spec.learner.eval_prompts, task.heldout_size)

    def run(self) -> float:
        """Mean reward of the weights as they are. Every evaluation has the same draws: differences are the policy's.

        What the task fails in, be it the prompt, a reply or the reward, is left out. Raises TaskFailed if all of it is.
        """
        prompts = [p for i in range(self.prompts) if (p := self._prompt(i)) is not None]
        generator = torch.Generator(device=self._model.device).manual_seed((self._spec.seed ^ _SALT) & (2**63 - 1))
        # A tokenizer is not safe to use from two threads.
        played = [(p, a) for p, a in zip(prompts, self._answers(prompts, generator), strict=True) if not a.failed]
        said = [turns_of(self._tokenizer, a.ids, a.marks) for _, a in played]
        with ThreadPoolExecutor(self._spec.task.limits.processes or _THREADS, "evaluate") as pool:
            rewards = [r for r in pool.map(self._reward, [p for p, _ in played], said) if r is not None]
        if not rewards:
            raise TaskFailed(f"not one of {self.prompts} held-out answers could be scored; the learner's log says why")
        return statistics.fmean(rewards)

    def _answers(self, prompts: Sequence[Prompt], generator: torch.Generator) -> list[_Answer]:
        """The policy's answers, played to their ends in rounds where the task has several turns."""
        answers = [_Answer(encode_prompt(self._tokenizer, prompt)) for prompt in prompts]
        running = list(range(len(prompts)))
        most = self._spec.sampling.max_tokens
        while running:
            made = self._sampled(
                [[*answers[i].prompt_ids, *answers[i].ids] for i in running],
                max(most - len(answers[i].ids) for i in running),
                generator,
            )
            for i, turn in zip(running, made, strict=True):
                left = most - len(answers[i].ids)
                answers[i].add(turn.ids[:left], own=True)
                answers[i].ended = turn.finish_reason == "stop" and len(turn.ids) <= left
            running = [i for i in running if answers[i].ended and self._replied(prompts[i], answers[i], most)]
        return answers

    def _replied(self, prompt: Prompt, answer: _Answer, most: int) -> bool:
        """Whether the environment had something to say for which, and one token more, there is room."""
        try:
            ids = reply_of(self._task, prompt, self._tokenizer, answer.ids, answer.marks)
        except (BadInput, TaskFailed) as error:
            log.warning("held-out prompt %d gets no reply: %s", prompt.index, error.detail)
            answer.failed = True
            return False
        if ids is None or len(answer.ids) + len(ids) >= most:
            return False
        answer.add(ids, own=False)
        return True

    def _prompt(self, index: int) -> Prompt | None:
        try:
            return self._task.heldout(index)
        except TaskFailed as error:
            log.warning("held-out prompt %d can't be had: %s", index, error.detail)
            return None

    def _reward(self, prompt: Prompt, turns: Sequence[str]) -> float | None:
        try:
            return reward_of_turns(self._task, prompt, turns)
        except EchoError as error:
            log.warning("held-out prompt %d has no reward: %s", prompt.index, error.detail)
            return None
