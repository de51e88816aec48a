"""Held-out reward.

Invariant: an evaluation of the same weights, task and seed gives the same number, and leaves no trace in the training:
it draws from a generator of its own and changes no weight.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.sampling import eos_ids, sample
from app.protocol.errors import EchoError, TaskFailed
from app.protocol.job import JobSpec
from app.tasks.base import Prompt, Task
from app.tasks.prompts import encode_prompt
from app.tasks.scoring import reply_of, reward_of_turns, turns_of

log = logging.getLogger(__name__)
_THREADS = 4
_SALT = 0x65766C
"""Keeps the draws apart from any other use of the job's seed."""


@dataclass(slots=True)
class _Answer:
    """An answer as far as it has come; `marks`: which tokens the policy wrote; `ended`: it has ended its turn."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    marks: list[bool] = field(default_factory=list)
    ended: bool = False

    def add(self, ids: Sequence[int], *, own: bool) -> None:
        self.ids.extend(ids)
        self.marks.extend([own] * len(ids))


class Evaluator:
    """One answer at temperature 1, nothing truncated, to each of the first `learner.eval_prompts` held-out prompts.

    With several ranks `run` is collective, and all of them sample the same answers: a forward pass takes them all.
    """

    def __init__(self, model: Any, tokenizer: Any, task: Task, spec: JobSpec, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._model = model
        self._tokenizer = tokenizer
        self._task = task
        self._spec = spec
        self.prompts = min(spec.learner.eval_prompts, task.heldout_size)

    def run(self) -> float:
        """Mean reward of the weights as they are. Every evaluation has the same draws: differences are the policy's.

        Answers whose reward fails are left out. Raises TaskFailed if all of them are, BadInput or TaskFailed if the
        environment of a multi-turn task fails.
        """
        self._ranks.announce("evaluate")
        prompts = [self._task.heldout(i) for i in range(self.prompts)]
        generator = torch.Generator(device=self._model.device).manual_seed((self._spec.seed ^ _SALT) & (2**63 - 1))
        # A tokenizer is not safe to use from two threads.
        said = [turns_of(self._tokenizer, a.ids, a.marks) for a in self._answers(prompts, generator)]
        with ThreadPoolExecutor(self._spec.task.limits.processes or _THREADS, "evaluate") as pool:
            rewards = [r for r in pool.map(self._reward, prompts, said) if r is not None]
        if not rewards:
            raise TaskFailed(f"not one of {len(prompts)} held-out answers could be scored; the learner's log says why")
        return statistics.fmean(rewards)

    def _answers(self, prompts: Sequence[Prompt], generator: torch.Generator) -> list[_Answer]:
        """The policy's answers, played to their ends in rounds where the task has several turns."""
        answers = [_Answer(encode_prompt(self._tokenizer, prompt)) for prompt in prompts]
        running = list(range(len(prompts)))
        most = self._spec.sampling.max_tokens
        while running:
            made = sample(
                self._model,
                [[*answers[i].prompt_ids, *answers[i].ids] for i in running],
                max_tokens=max(most - len(answers[i].ids) for i in running),
                temperature=1.0,
                eos=eos_ids(self._model, self._tokenizer),
                generator=generator,
                agree=self._ranks.first,
            )
            for i, turn in zip(running, made, strict=True):
                left = most - len(answers[i].ids)
                answers[i].add(turn.ids[:left], own=True)
                answers[i].ended = turn.finish_reason == "stop" and len(turn.ids) <= left
            running = [i for i in running if answers[i].ended and self._replied(prompts[i], answers[i], most)]
        return answers

    def _replied(self, prompt: Prompt, answer: _Answer, most: int) -> bool:
        """Whether the environment had something to say for which, and one token more, there is room."""
        ids = reply_of(self._task, prompt, self._tokenizer, answer.ids, answer.marks)
        if ids is None or len(answer.ids) + len(ids) >= most:
            return False
        answer.add(ids, own=False)
        return True

    def _reward(self, prompt: Prompt, turns: Sequence[str]) -> float | None:
        try:
            return reward_of_turns(self._task, prompt, turns)
        except EchoError as error:
            log.warning("held-out prompt %d has no reward: %s", prompt.index, error.detail)
            return None
