"""The optimisation step.

Invariant: a step's result depends on its groups, the weights, the optimizer and the number of steps made, never on how
it is cut into micro-batches or spread over ranks, and it draws no random numbers. A step that would not be finite
changes nothing. All ranks come to the same numbers, so that they go the same way at every branch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from app.learner.advantages import batch_advantages
from app.learner.alignment import GRADIENT, Alignment
from app.learner.buffer import Group
from app.learner.copier import Copier
from app.learner.device import Lane, host_copies, lane_of, moment, stopwatch
from app.learner.laps import Laps
from app.learner.metrics import (
    Seen,
    advantage_metrics,
    borrowed_metrics,
    lag_metrics,
    node_metrics,
    step_metrics,
)
from app.learner.microbatch import Row, row_of
from app.learner.model import check_weights, trained_weights
from app.learner.optimizer import adamw
from app.learner.parallel.messages import Progress, Rehearsal, packed, unpacked
from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.parallel.shards import needs_shards, number, prepare_passes, reshard, shard, spread, whole
from app.learner.passes import Passes
from app.learner.reference import frozen_copy
from app.protocol.errors import LearnerError
from app.protocol.job import JobSpec

_REHEARSED_BATCHES = 4


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a step did: mean reward of its rollouts, seconds of active training, further numbers by name."""

    reward: float
    t_train: float
    values: dict[str, float]
    times: dict[str, float] = field(default_factory=dict)
    """What `t_train` went into, seconds, and the tokens a second that came of it."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Weights (by `trained_weights`' names), the optimizer as tensors (`FIELD/NAME`; among them the previous gradient
    where it decides anything), and the number of steps made; whole tensors in host memory, whatever the number of
    ranks. Empty on ranks other than 0."""

    steps: int
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    skipped: bool = False
    """Whether the last step changed nothing (`learner.gac`)."""


class GRPOTrainer:
    """AdamW over the chosen policy loss; weights stay in the model that was handed in.

    With several ranks `step`, `rehearse`, `state`, `weights` and `restore` are collective. Rank 0 announces them to the
    others, which call them with what was announced (app/learner/parallel/follow.py).
    """

    def __init__(
        self,
        model: Any,
        spec: JobSpec,
        *,
        ranks: Ranks = ALONE,
        clock: Callable[[], float] = time.perf_counter,
        lane: Lane | None = None,
    ) -> None:
        """`lane`: what copies to host memory go through; default: a GPU's own, if the model is on one."""
        self.model = model
        self.steps = 0
        self._spec = spec
        self._ranks = ranks
        self._clock = clock
        # Before any checkpoint is restored: the reference is v0.
        self._reference = frozen_copy(model) if spec.learner.kl_beta > 0 else None
        prepare_passes(model, spec.learner)
        if needs_shards(spec.learner, ranks):
            shard(model, spec.learner, ranks)
            if self._reference is not None:
                shard(self._reference, spec.learner, ranks)
        self._named = dict(model.named_parameters())
        self._trained = {name: p for name, p in self._named.items() if p.requires_grad}
        self._optimizer = adamw(self._trained.values(), spec.learner.learning_rate)
        self._alignment = Alignment(spec, self._named, ranks)
        self._copier = Copier()
        self._lane = lane or lane_of(model.device)
        self._laps = Laps(*stopwatch(model.device, clock))
        self._runner = Passes(model, self._reference, spec, ranks, self._laps)

    def step(self, groups: Sequence[Group]) -> StepMetrics:
        """One update from whole groups. Raises LearnerError, before any change, if loss or gradient is not finite."""
        began = self._clock()
        self._laps.start()
        spec, nodes = self._spec.learner, {g.work_item: g.node for g in groups}
        if self._ranks.size > 1:
            data = packed(groups)
            self._ranks.announce("step", data)
            # What the others read is what is trained on here: log-probs and rewards in float32.
            groups = unpacked(data)
        advantages = batch_advantages([[r.reward for r in g.rollouts] for g in groups], spec.reward_scale)
        rows = [
            row_of(r, a, self.steps, one_sided=spec.one_sided)
            for g, values in zip(groups, advantages, strict=True)
            for r, a in zip(g.rollouts, values, strict=True)
            if any(values)
        ]
        owners = [nodes.get(g.work_item, "") for g, v in zip(groups, advantages, strict=True) if any(v) for _ in v]
        # Tokens of groups without a signal count here although they are left out below: same gradient, less work.
        denominator = sum(g.tokens for g in groups)
        self._laps.lap("data")
        seen = self._backward(rows, denominator)
        self._laps.lap("backward")
        values = self._metrics(groups, advantages, seen) | self._alignment.look()
        values |= node_metrics(seen.log_ratio, [(owners[i], rows[i].own_tokens) for i in self._runner.order(rows)])
        values |= {"grad_norm": self._clip(), "learning_rate": self._rate(self.steps)}
        self._laps.lap("metrics")
        self._copier.settle()
        self._laps.lap("publish")
        self._optimizer.param_groups[0]["lr"] = values["learning_rate"]
        if not self._alignment.skipped:
            reshard(self.model)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._laps.lap("optimizer")
        self.steps += 1
        times = self._laps.metrics()
        spent = self._clock() - began
        speed = {"tokens_per_s": denominator / spent if spent > 0 else 0.0}
        return StepMetrics(values["reward"], spent, values, times | speed)

    def _metrics(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], seen: Seen) -> dict[str, float]:
        own = [(g, a) for g, a in zip(groups, advantages, strict=True) if not g.borrowed]
        mine, theirs = [a for _, a in own], [g for g in groups if g.borrowed]
        values = step_metrics([g for g, _ in own], seen, sum(g.tokens for g, _ in own)) | advantage_metrics(mine)
        return values | lag_metrics([g for g, _ in own], mine, self.steps) | borrowed_metrics(theirs, seen)

    def rehearse(self, rollouts: int, prompts: Sequence[Sequence[int]], completion_tokens: int) -> float:
        """Seconds that a step of `rollouts` would take if every group carried a signal.

        Made-up completions of `completion_tokens` tokens, learning rate 0, an optimizer of its own: weights, optimizer,
        gradients and random state are as before. Only a few micro-batches are run, and their time scaled up.
        """
        size = completion_tokens
        asked = Rehearsal(rollouts=rollouts, prompts=[list(p) for p in prompts], completion_tokens=size)
        self._ranks.announce("rehearse", asked.model_dump_json().encode())
        # Shared: a step of many long answers would be gigabytes of lists.
        answers, logprobs, lags = [[token] * size for token in range(1, 8)], [-1.0] * size, [1] * size
        rows = [
            Row(prompts[i % len(prompts)], answers[i % 7], logprobs, 1.0 - i % 2 * 2, lags) for i in range(rollouts)
        ]
        batches = self._runner.plan(rows)
        rehearsed = batches[:_REHEARSED_BATCHES]
        spare = adamw(self._trained.values(), 0.0)
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
        return passes * sum(map(len, batches)) / max(1, sum(map(len, rehearsed))) + update

    def state(self) -> TrainerState:
        """A copy of everything that a later process needs to go on exactly."""
        self._ranks.announce("state")
        weights, optimizer = self._whole(trained_weights(self.model)), self._whole(self._optimized())
        return TrainerState(self.steps, weights, optimizer, self._alignment.skipped)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of `state` alone, a third of it or less."""
        self._ranks.announce("weights")
        return self._whole(trained_weights(self.model))

    def snapshot(self, *, optimizer: bool = True) -> TrainerState:
        """Like `state`, but the copy is made beside what comes next: `step` waits for it before it changes anything.
        Without `optimizer` the weights alone are copied.

        The shards of several ranks are put together by all of them at once, so then it is `state` or `weights`.
        """
        if self._ranks.size > 1:
            return self.state() if optimizer else TrainerState(self.steps, self.weights(), {})
        now = moment(self.model.device)
        parts = [trained_weights(self.model), *([self._optimized()] if optimizer else [])]
        copies = self._copier.begin(*(partial(host_copies, part, now, self._lane) for part in parts))
        return TrainerState(self.steps, copies[0], copies[1] if optimizer else {}, self._alignment.skipped)

    def _optimized(self) -> dict[str, torch.Tensor]:
        """AdamW's moments and counters, and the previous gradient where it decides anything."""
        moments = {
            f"{field}/{name}": value
            for name, parameter in self._named.items()
            for field, value in self._optimizer.state.get(parameter, {}).items()
        }
        return moments | self._alignment.kept()

    def restore(self, state: TrainerState) -> None:
        """Go on from a state. Raises LearnerError, before any change, if it is of another model."""
        check_weights(self.model, state.weights)
        names = {key.partition("/")[2] for key in state.optimizer}
        if not names <= self._named.keys():
            raise LearnerError("the checkpoint's optimizer is of another model")
        progress = Progress(steps=state.steps, optimizer=list(state.optimizer), skipped=state.skipped)
        self._ranks.announce("restore", progress.model_dump_json().encode())
        self.receive(progress, state)

    @torch.no_grad()
    def receive(self, progress: Progress, state: TrainerState | None = None) -> None:
        """Take in what rank 0 hands out; `state` is given there. Ranks other than 0 call this for a `restore`."""
        self._copier.settle()
        for name, tensor in trained_weights(self.model).items():
            tensor.copy_(spread(None if state is None else state.weights[name], tensor, self._ranks))
        self._optimizer.state.clear()
        gradients: dict[str, torch.Tensor] = {}
        for key in progress.optimizer:
            field, _, name = key.partition("/")
            parameter = self._named[name]
            # AdamW keeps its step counter on the CPU.
            like = torch.zeros(()) if field == "step" else parameter.detach()
            value = spread(None if state is None else state.optimizer[key], like, self._ranks)
            if field == GRADIENT:
                gradients[name] = value
            else:
                self._optimizer.state.setdefault(parameter, {})[field] = value
        self.steps = progress.steps
        self._alignment.restore(gradients, progress.skipped)

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = {name: whole(t, keep=self._ranks.rank == 0) for name, t in tensors.items()}
        return {name: t for name, t in copies.items() if t is not None}

    def _rate(self, steps: int) -> float:
        spec = self._spec.learner
        return spec.learning_rate * min(1.0, (steps + 1) / max(1, spec.warmup_steps))

    def _backward(self, rows: Sequence[Row], denominator: int) -> Seen:
        self._optimizer.zero_grad(set_to_none=True)
        seen = self._passes(self._runner.plan(rows), denominator)
        for parameter in self._named.values():
            # A step without any signal still decays the optimizer's moments, as if its zero gradient had been computed.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return seen

    def _passes(self, batches: Sequence[Sequence[Row]], denominator: int) -> Seen:
        seen = self._runner.run(batches, denominator, self.steps)
        if not math.isfinite(seen.loss):
            self._optimizer.zero_grad(set_to_none=True)
            raise LearnerError(f"the loss of step {self.steps + 1} is not finite; lower the learning rate")
        return seen

    def _clip(self) -> float:
        norm = number(torch.nn.utils.clip_grad_norm_(self._trained.values(), self._spec.learner.grad_clip))
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise LearnerError(f"the gradient of step {self.steps + 1} is not finite; lower the learning rate")
        return norm

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
