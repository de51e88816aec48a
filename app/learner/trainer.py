"""The optimisation step.

Invariant: a step's result depends on its groups, the weights, the optimizer and the number of steps made, never on how
it is cut into micro-batches, and it draws no random numbers. A step that would not be finite changes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.learner.advantages import group_advantages
from app.learner.buffer import Group
from app.learner.losses import ppo_clip
from app.learner.microbatch import Row, collate, completion_logprobs, split
from app.learner.model import restore_weights, unique_weights
from app.protocol.errors import LearnerError
from app.protocol.job import JobSpec

BETAS = (0.9, 0.95)
_REHEARSED_BATCHES = 4
_SUMS = ("ratio", "mismatch_kl", "log_ratio_squared", "clipped")


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
    """AdamW over the clipped GRPO objective; weights stay in the model that was handed in."""

    def __init__(self, model: Any, spec: JobSpec, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model = model
        self.steps = 0
        self._spec = spec
        self._clock = clock
        self._named = dict(model.named_parameters())
        self._optimizer = _adamw(self._named, spec.learner.learning_rate)

    def step(self, groups: Sequence[Group]) -> StepMetrics:
        """One update from whole groups. Raises LearnerError, before any change, if loss or gradient is not finite."""
        began = self._clock()
        advantages = [group_advantages([r.reward for r in g.rollouts]) for g in groups]
        rows = [
            Row(r.prompt_ids, r.completion_ids, r.logprobs, a)
            for g, values in zip(groups, advantages, strict=True)
            for r, a in zip(g.rollouts, values, strict=True)
            if any(values)
        ]
        # Tokens of groups without a signal count here although they are left out below: same gradient, less work.
        denominator = sum(g.tokens for g in groups)
        sums = self._backward(rows, denominator)
        norm = self._clip()
        rate = self._rate(self.steps)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        values = _metrics(groups, rows, sums, denominator) | {"grad_norm": norm, "learning_rate": rate}
        return StepMetrics(values["reward"], self._clock() - began, values)

    def rehearse(self, rollouts: int, prompts: Sequence[Sequence[int]], completion_tokens: int) -> float:
        """Seconds that a step of `rollouts` would take if every group carried a signal.

        Made-up completions of `completion_tokens` tokens, learning rate 0, an optimizer of its own: weights, optimizer,
        gradients and random state are as before. Only a few micro-batches are run, and their time scaled up.
        """
        rows = [
            Row(prompts[i % len(prompts)], [i % 7 + 1] * completion_tokens, [-1.0] * completion_tokens, 1.0 - i % 2 * 2)
            for i in range(rollouts)
        ]
        batches = split([r.length for r in rows], self._spec.learner.micro_batch_tokens)
        spare = _adamw(self._named, 0.0)
        with torch.random.fork_rng():
            self._pass([rows[i] for i in batches[0]], rollouts * completion_tokens)  # pays for allocation
            self._synchronise()
            began = self._clock()
            for batch in batches[:_REHEARSED_BATCHES]:
                self._pass([rows[i] for i in batch], rollouts * completion_tokens)
            self._synchronise()
            passes = self._clock() - began
            began = self._clock()
            spare.step()
            self._synchronise()
            update = self._clock() - began
        self._optimizer.zero_grad(set_to_none=True)
        done = sum(len(b) for b in batches[:_REHEARSED_BATCHES])
        return passes * rollouts / done + update

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

    def _rate(self, steps: int) -> float:
        spec = self._spec.learner
        return spec.learning_rate * min(1.0, (steps + 1) / max(1, spec.warmup_steps))

    def _backward(self, rows: Sequence[Row], denominator: int) -> Mapping[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        totals = dict.fromkeys(("loss", *_SUMS), 0.0)
        for batch in split([r.length for r in rows], self._spec.learner.micro_batch_tokens):
            for name, value in self._pass([rows[i] for i in batch], denominator).items():
                totals[name] += value
        for parameter in self._named.values():
            # A step without any signal still decays the optimizer's moments, as if its zero gradient had been computed.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return totals

    def _pass(self, rows: Sequence[Row], denominator: int) -> dict[str, float]:
        spec = self._spec.learner
        batch = collate(rows, self.model.device)
        terms = ppo_clip(
            completion_logprobs(self.model, batch, self._spec.sampling.temperature),
            batch.behaviour,
            batch.advantage,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            denominator=denominator,
        )
        if not torch.isfinite(terms.loss):
            self._optimizer.zero_grad(set_to_none=True)
            raise LearnerError(f"the loss of step {self.steps + 1} is not finite; lower the learning rate")
        torch.autograd.backward(terms.loss)
        return {"loss": terms.loss.item()} | {name: float(getattr(terms, name)) for name in _SUMS}

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


def _metrics(groups: Sequence[Group], rows: Sequence[Row], sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Means over the step. Ratio, KL and clip share are over the tokens that were trained on, entropy over all.

    The entropy is that of the behaviour policy, estimated as the mean of −log π of the tokens it sampled.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = [len(r.completion_ids) for r in rollouts]
    active = sum(len(r.completion_ids) for r in rows)
    per_token = {name: sums[name] / active if active else 0.0 for name in _SUMS}
    return {
        "reward": statistics.fmean(r.reward for r in rollouts),
        "loss": sums["loss"],
        "ratio_mean": per_token["ratio"] if active else 1.0,
        "mismatch_kl": per_token["mismatch_kl"],
        "log_ratio_squared": per_token["log_ratio_squared"],
        "clip_share": per_token["clipped"],
        "entropy": -sum(sum(r.logprobs) for r in rollouts) / tokens,
        "zero_variance_share": sum(len({r.reward for r in g.rollouts}) == 1 for g in groups) / len(groups),
        "completion_tokens_mean": statistics.fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "tokens": float(tokens),
        "active_tokens": float(active),
    }
