"""The forward and backward passes of a step.

Invariant: what comes out is of the whole step and the same on every rank, however the rows are cut into micro-batches
and spread over ranks; all ranks make the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from app.learner.laps import Laps
from app.learner.losses import WHOLE_STEP, Limits, Tokens, reference_kl, surrogate, whole_step
from app.learner.metrics import Seen, joined
from app.learner.microbatch import Row, collate, completion_logprobs, share
from app.learner.parallel.ranks import Ranks
from app.learner.parallel.shards import recomputing
from app.learner.reference import draws
from app.learner.weights import log_ratio
from app.protocol.job import JobSpec

_NOTHING = Row([0], [0], [0.0], 0.0, [0])
"""What a rank passes through the model when the others have more to do: a pass is something that all ranks do."""


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
            own = joined([self._pass(b, part, denominator) for b, part in zip(batches, limits, strict=True)])
        ranks = self._ranks
        tokens = [ranks.joined(t) for t in (own.log_ratio, own.lag, own.high, own.low)]
        loss, kl = ranks.total([own.loss, own.reference_kl or 0.0])
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
            draw = draws(rows, self._spec.seed, self._step).to(self._model.device)
        quantised = batch.quantised if self._spec.learner.one_sided else None
        return Tokens(logprobs, batch.behaviour, batch.advantage, batch.lag, batch.sequence, reference, draw, quantised)

    def _pass(self, rows: Sequence[Row], limits: Limits, denominator: int) -> Seen:
        if not rows:
            torch.autograd.backward(0.0 * self._tokens([_NOTHING]).logprobs.sum())
            return joined([])
        tokens = self._tokens(rows)
        found = surrogate(self._spec.learner, tokens, limits)
        loss = -found.objective.sum() / denominator
        self._laps.lap("forward")
        # Shards take the mean over the ranks; what is wanted is the sum.
        torch.autograd.backward(loss * self._ranks.size)
        self._laps.lap("backward")
        moved = log_ratio(tokens.logprobs.detach(), tokens.behaviour)
        seen = Seen(loss.item(), moved, tokens.lag, found.high, found.low)
        if tokens.reference is None:
            return seen
        return replace(seen, reference_kl=float(reference_kl(tokens.logprobs.detach(), tokens.reference).sum()))
