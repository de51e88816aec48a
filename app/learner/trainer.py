"""The optimisation step.

Invariant: a step's result depends on its groups, the weights, the optimizer and the number of steps made, never on how
it is cut into micro-batches, and it draws no random numbers. A step that would not be finite changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.learner.advantages import batch_advantages
from app.learner.buffer import Group
from app.learner.losses import WHOLE_STEP, Limits, Tokens, surrogate, whole_step
from app.learner.metrics import Seen, joined, step_metrics
from app.learner.microbatch import Row, collate, completion_logprobs, split, token_lags
from app.learner.model import restore_weights, unique_weights
from app.learner.weights import log_ratio
from app.protocol.errors import LearnerError
from app.protocol.job import JobSpec

BETAS = (0.9, 0.95)
_REHEARSED_BATCHES = 4


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a step did: mean reward of its rollouts, seconds of active training, further numbers by name."""

    reward: float
    t_train: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Weights (by `unique_weights`' names), the optimizer as tensors, and the number of steps made."""

    steps: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


class GRPOTrainer:
    """AdamW over the chosen policy loss; weights stay in the model that was handed in."""

    def __init__(self, model: Any, spec: JobSpec, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model = model
        self.steps = 0
        self._spec = spec
        self._clock = clock
        self._named = dict(model.named_parameters())
        self._optimizer = _adamw(self._named, spec.learner.learning_rate)
        self._previous: dict[str, torch.Tensor] | None = None

    def step(self, groups: Sequence[Group]) -> StepMetrics:
        """One update from whole groups. Raises LearnerError, before any change, if loss or gradient is not finite."""
        began = self._clock()
        spec = self._spec.learner
        advantages = batch_advantages([[r.reward for r in g.rollouts] for g in groups], spec.reward_scale)
        rows = [
            Row(r.prompt_ids, r.completion_ids, r.logprobs, a, token_lags(r, self.steps))
            for g, values in zip(groups, advantages, strict=True)
            for r, a in zip(g.rollouts, values, strict=True)
            if any(values)
        ]
        # Tokens of groups without a signal count here although they are left out below: same gradient, less work.
        denominator = sum(g.tokens for g in groups)
        seen = self._backward(rows, denominator)
        values = step_metrics(groups, seen, denominator) | self._cosine()
        values |= {"grad_norm": self._clip(), "learning_rate": self._rate(self.steps)}
        self._optimizer.param_groups[0]["lr"] = values["learning_rate"]
        self._optimizer.step()
        self._remember()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepMetrics(values["reward"], self._clock() - began, values)

    def rehearse(self, rollouts: int, prompts: Sequence[Sequence[int]], completion_tokens: int) -> float:
        """Seconds that a step of `rollouts` would take if every group carried a signal.

        Made-up completions of `completion_tokens` tokens, learning rate 0, an optimizer of its own: weights, optimizer,
        gradients and random state are as before. Only a few micro-batches are run, and their time scaled up.
        """
        spec, size = self._spec.learner, completion_tokens
        rows = [
            Row(prompts[i % len(prompts)], [i % 7 + 1] * size, [-1.0] * size, 1.0 - i % 2 * 2, [1] * size)
            for i in range(rollouts)
        ]
        batches = [[rows[i] for i in b] for b in split([r.length for r in rows], spec.micro_batch_tokens)]
        rehearsed = batches[:_REHEARSED_BATCHES]
        spare = _adamw(self._named, 0.0)
        with torch.random.fork_rng():
            self._passes(batches[:1], rollouts * size)  # pays for allocation
            self._synchronise()
            began = self._clock()
            self._passes(rehearsed, rollouts * size)
            self._synchronise()
            passes = self._clock() - began
            began = self._clock()
            spare.step()
            self._synchronise()
            update = self._clock() - began
        self._optimizer.zero_grad(set_to_none=True)
        return passes * rollouts / sum(len(b) for b in rehearsed) + update

    def state(self) -> TrainerState:
        """A copy of everything that a later process needs to go on exactly."""
        weights = {name: t.detach().to("cpu", copy=True) for name, t in unique_weights(self.model).items()}
        optimizer = {
            f"{field}/{name}": value.detach().to("cpu", copy=True)
            for name, parameter in self._named.items()
            for field, value in self._optimizer.state.get(parameter, {}).items()
        }
        return TrainerState(self.steps, weights, optimizer)

    def restore(self, state: TrainerState) -> None:
        """Go on from a state. Raises LearnerError if it is of another model."""
        restore_weights(self.model, state.weights)
        fields: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.optimizer.items():
            field, _, name = key.partition("/")
            fields.setdefault(name, {})[field] = value
        if not fields.keys() <= self._named.keys():
            raise LearnerError("the checkpoint's optimizer is of another model")
        self._optimizer.state.clear()
        for name, values in fields.items():
            parameter = self._named[name]
            # AdamW keeps its step counter on the CPU.
            self._optimizer.state[parameter] = {
                f: v.clone() if f == "step" else v.to(parameter.device, copy=True) for f, v in values.items()
            }
        self.steps = state.steps
        self._previous = None

    def _rate(self, steps: int) -> float:
        spec = self._spec.learner
        return spec.learning_rate * min(1.0, (steps + 1) / max(1, spec.warmup_steps))

    def _backward(self, rows: Sequence[Row], denominator: int) -> Seen:
        self._optimizer.zero_grad(set_to_none=True)
        order = split([r.length for r in rows], self._spec.learner.micro_batch_tokens)
        seen = self._passes([[rows[i] for i in batch] for batch in order], denominator)
        for parameter in self._named.values():
            # A step without any signal still decays the optimizer's moments, as if its zero gradient had been computed.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return seen

    def _passes(self, batches: Sequence[Sequence[Row]], denominator: int) -> Seen:
        """Forward and backward over all micro-batches; for some losses after a forward pass over all of them."""
        limits = self._limits(batches)
        return joined([self._pass(b, part, denominator) for b, part in zip(batches, limits, strict=True)])

    @torch.no_grad()
    def _limits(self, batches: Sequence[Sequence[Row]]) -> list[Limits]:
        """What each micro-batch has to know of the whole step."""
        spec = self._spec.learner
        if spec.loss not in WHOLE_STEP or not batches:
            return [Limits()] * len(batches)
        ratios, advantages = [], []
        for rows in batches:
            tokens = self._tokens(rows)
            ratios.append(log_ratio(tokens.logprobs, tokens.behaviour))
            advantages.append(tokens.advantages)
        limits = whole_step(spec, torch.cat(ratios), torch.cat(advantages))
        if limits.keep is None:
            return [limits] * len(batches)
        keeps = torch.split(limits.keep, [len(r) for r in ratios])
        return [replace(limits, keep=keep) for keep in keeps]

    def _tokens(self, rows: Sequence[Row]) -> Tokens:
        batch = collate(rows, self.model.device)
        logprobs = completion_logprobs(self.model, batch, self._spec.sampling.temperature)
        return Tokens(logprobs, batch.behaviour, batch.advantage, batch.lag, batch.row)

    def _pass(self, rows: Sequence[Row], limits: Limits, denominator: int) -> Seen:
        tokens = self._tokens(rows)
        found = surrogate(self._spec.learner, tokens, limits)
        loss = -found.objective.sum() / denominator
        if not torch.isfinite(loss):
            self._optimizer.zero_grad(set_to_none=True)
            raise LearnerError(f"the loss of step {self.steps + 1} is not finite; lower the learning rate")
        torch.autograd.backward(loss)
        moved = log_ratio(tokens.logprobs.detach(), tokens.behaviour)
        return Seen(loss.item(), moved, tokens.lag, found.high, found.low)

    def _cosine(self) -> dict[str, float]:
        """Cosine of this gradient with the previous step's; nothing for the first of a process, or if one is zero."""
        if self._previous is None:
            return {}
        pairs = [(p.grad, self._previous[n]) for n, p in self._named.items() if p.grad is not None]
        dot, new, old = (
            sum(float((x * y).sum()) for x, y in which)
            for which in (pairs, [(g, g) for g, _ in pairs], [(h, h) for _, h in pairs])
        )
        return {"grad_cosine": dot / math.sqrt(new * old)} if new > 0 and old > 0 else {}

    def _remember(self) -> None:
        if self._spec.learner.grad_cosine:
            # The optimizer's zero_grad lets go of these tensors, so that they need no copy.
            self._previous = {n: p.grad for n, p in self._named.items() if p.grad is not None}

    def _clip(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._named.values(), self._spec.learner.grad_clip))
        if not torch.isfinite(torch.tensor(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise LearnerError(f"the gradient of step {self.steps + 1} is not finite; lower the learning rate")
        return norm

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _adamw(named: Mapping[str, torch.nn.Parameter], lr: float) -> torch.optim.AdamW:
    trained = [p for p in named.values() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=BETAS, weight_decay=0.0)
