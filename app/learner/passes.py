"""The forward and backward passes of a step.

Invariant: what comes out is of the whole step and the same on every rank, however the rows are cut into micro-batches
and spread over ranks; all ranks make the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.learner.device import sent
from app.learner.laps import Laps
from app.learner.losses import WHOLE_STEP, Limits, Tokens, reference_kl, surrogate, whole_step
from app.learner.metrics import Seen
from app.learner.microbatch import Row, collate, completion_logprobs, share
from app.learner.parallel.ranks import Ranks
from app.learner.parallel.shards import recomputing
from app.learner.reference import draws
from app.learner.weights import log_ratio
from app.protocol.job import JobSpec

_NOTHING = Row([0], [0], [0.0], 0.0, [0])
"""What a rank passes through the model when the others have more to do: a pass is something that all ranks do."""


@dataclass(frozen=True, slots=True)
class _Part:
    """`Seen` of a micro-batch, on the device: the host need not wait for it. Sums are in float64."""

    loss: torch.Tensor
    reference_kl: torch.Tensor
    log_ratio: torch.Tensor
    lag: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor


def _joined(parts: Sequence[_Part], device: torch.device) -> _Part:
    """Micro-batches as one."""
    if not parts:
        zero, none = torch.zeros((), dtype=torch.float64, device=device), torch.zeros(0, device=device)
        return _Part(zero, zero, none, none.long(), none.bool(), none.bool())
    sums = (torch.stack([getattr(p, name) for p in parts]).sum() for name in ("loss", "reference_kl"))
    lists = (torch.cat([getattr(p, name) for p in parts]) for name in ("log_ratio", "lag", "high", "low"))
    return _Part(*sums, *lists)


class Passes:
    """Passes of one model, against a reference if there is one."""

    def __init__(self, model: Any, reference: Any, spec: JobSpec, ranks: Ranks, laps: Laps) -> None:
        self._model = model
        self._reference = reference
        self._spec = spec
        self._ranks = ranks
        self._laps = laps
        self._step = 0

    def run(self, batches: Sequence[Sequence[Row]], denominator: int, step: int) -> Seen:
        """Forward and backward over all micro-batches; for some losses after a forward pass over all of them.

        Gradients are added to what the parameters have. `step` is the number of steps made. Collective.
        """
        self._step = step
        limits = self._limits(batches)
        self._laps.lap("forward")
        with recomputing(self._model, self._spec.learner):
            parts = [self._pass(b, part, denominator) for b, part in zip(batches, limits, strict=True)]
        own, ranks = _joined(parts, self._model.device), self._ranks
        tokens = [ranks.joined(t).cpu() for t in (own.log_ratio, own.lag, own.high, own.low)]
        loss, kl = ranks.total([float(own.loss), float(own.reference_kl)])
        seen = Seen(loss, tokens[0], tokens[1], tokens[2], tokens[3])
        return seen if self._reference is None else replace(seen, reference_kl=kl)

    def plan(self, rows: Sequence[Row]) -> list[list[Row]]:
        """This rank's micro-batches."""
        return [[rows[i] for i in batch] for batch in self._shares(rows)[self._ranks.rank]]

    def _shares(self, rows: Sequence[Row]) -> list[list[list[int]]]:
        """Row numbers by rank and micro-batch."""
        spec, lengths = self._spec.learner, [r.length for r in rows]
        return share(lengths, self._ranks.size, spec.micro_batch_tokens, packed=spec.packing)

    def order(self, rows: Sequence[Row]) -> list[int]:
        """Row numbers in the order in which the tokens of a step come back from all ranks."""
        return [i for plan in self._shares(rows) for batch in plan for i in batch]

    @torch.no_grad()
    def _limits(self, batches: Sequence[Sequence[Row]]) -> list[Limits]:
        """What each micro-batch has to know of the whole step."""
        spec = self._spec.learner
        if spec.loss not in WHOLE_STEP or not batches:
            return [Limits()] * len(batches)
        ratios, advantages = [], []
        for rows in batches:
            tokens, used = self._tokens(rows or [_NOTHING]), slice(None if rows else 0)
            ratios.append(log_ratio(tokens.logprobs, tokens.behaviour)[used])
            advantages.append(tokens.advantages[used])
            self._laps.lap("forward")
        own, ranks = torch.cat(ratios), self._ranks
        limits = whole_step(spec, ranks.joined(own), ranks.joined(torch.cat(advantages)))
        if limits.keep is None:
            return [limits] * len(batches)
        before = int(ranks.joined(torch.tensor([len(own)]))[: ranks.rank].sum())
        keeps = torch.split(limits.keep[before : before + len(own)], [len(r) for r in ratios])
        return [replace(limits, keep=keep) for keep in keeps]

    def _tokens(self, rows: Sequence[Row]) -> Tokens:
        batch = collate(rows, self._model.device, packed=self._spec.learner.packing)
        self._laps.lap("data")
        logprobs = completion_logprobs(self._model, batch, self._spec.sampling.temperature)
        reference, draw = None, None
        if self._reference is not None and torch.is_grad_enabled():
            with torch.no_grad():
                reference = completion_logprobs(self._reference, batch, self._spec.sampling.temperature)
        if self._spec.learner.loss == "obrs":
            draw = sent(draws(rows, self._spec.seed, self._step), self._model.device)
        held = batch.held if self._spec.learner.one_sided or self._spec.learner.borrow else None
        return Tokens(logprobs, batch.behaviour, batch.advantage, batch.lag, batch.sequence, reference, draw, held)

    def _pass(self, rows: Sequence[Row], limits: Limits, denominator: int) -> _Part:
        if not rows:
            torch.autograd.backward(0.0 * self._tokens([_NOTHING]).logprobs.sum())
            return _joined([], self._model.device)
        tokens = self._tokens(rows)
        found = surrogate(self._spec.learner, tokens, limits)
        loss = -found.objective.sum() / denominator
        self._laps.lap("forward")
        # Shards take the mean over the ranks; what is wanted is the sum.
        torch.autograd.backward(loss * self._ranks.size)
        self._laps.lap("backward")
        moved = log_ratio(tokens.logprobs.detach(), tokens.behaviour)
        kl = torch.zeros_like(loss)
        if tokens.reference is not None:
            kl = reference_kl(tokens.logprobs.detach(), tokens.reference).sum()
        return _Part(loss.detach().double(), kl.detach().double(), moved, tokens.lag, found.high, found.low)
