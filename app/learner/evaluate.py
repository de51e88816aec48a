"""Held-out reward.

Invariant: an evaluation of the same weights, task and seed gives the same number, and leaves no trace in the training:
it draws from a generator of its own and changes no weight.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.sampling import eos_ids, sample
from app.protocol.job import JobSpec
from app.tasks.base import Task
from app.tasks.prompts import decode, encode_prompt

_SALT = 0x65766C
"""Keeps the draws apart from any other use of the job's seed."""


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
        """Mean reward of the weights as they are. Every evaluation has the same draws: differences are the policy's."""
        self._ranks.announce("evaluate")
        prompts = [self._task.heldout(i) for i in range(self.prompts)]
        device = self._model.device
        generator = torch.Generator(device=device).manual_seed((self._spec.seed ^ _SALT) & (2**63 - 1))
        made = sample(
            self._model,
            [encode_prompt(self._tokenizer, p) for p in prompts],
            max_tokens=self._spec.sampling.max_tokens,
            temperature=1.0,
            eos=eos_ids(self._model, self._tokenizer),
            generator=generator,
            agree=self._ranks.first,
        )
        rewards = [self._task.reward(p, decode(self._tokenizer, c.ids)) for p, c in zip(prompts, made, strict=True)]
        return statistics.fmean(rewards)
