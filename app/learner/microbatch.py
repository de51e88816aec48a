"""Cutting a step into forward/backward passes that fit.

Invariant: every row is in exactly one micro-batch of exactly one rank, and a micro-batch of more than one row has at
most `limit` tokens, padding included; who gets what is a function of the lengths alone. All ranks make the same number
of passes. A token that the policy did not write is input, and has no element in anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from app.learner.buffer import BORROWED
from app.learner.device import sent
from app.protocol.trajectory import Rollout

T = TypeVar("T")
NO_LAG = -1
"""The lag of tokens that no version of this job has sampled."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout as the trainer sees it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    lags: Sequence[int]
    """t − x of each completion token."""
    held: bool = False
    """Whether it gets no importance weight above 1."""
    generated: Sequence[bool] | None = None
    """Of each completion token, whether the policy wrote it; None: all of them."""

    @property
    def length(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def own(self, values: Iterable[T]) -> Iterable[T]:
        """Of values that belong to the completion tokens, those of tokens that the policy wrote."""
        return values if self.generated is None else itertools.compress(values, self.generated)

    @property
    def own_tokens(self) -> int:
        """Completion tokens that the policy wrote: those that are trained on."""
        return len(self.completion_ids) if self.generated is None else sum(self.generated)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows and, one element a completion token that the policy wrote, where its logits are and what belongs to it.
    What others wrote stands in `ids` and nowhere else: the policy reads it and is not judged by it.

    `ids` [rows, width], padded on the right, or [1, tokens] with one answer after the other; then `places` [1, tokens]
    is the place of each token in its answer. `row` and `position` index the logits that predict the token, `sequence`
    numbers the answers; `token`, `behaviour`, `advantage`, `lag`, `held` are 1-D. `first`: the smallest position.
    """

    ids: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    token: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    lag: torch.Tensor
    held: torch.Tensor
    first: int
    places: torch.Tensor | None = None


def token_lags(rollout: Rollout, t: int) -> list[int]:
    """t − x of each completion token, x the version that it was sampled from."""
    ends = [*rollout.span_starts[1:], len(rollout.completion_ids)]
    spans = zip(rollout.span_versions, rollout.span_starts, ends, strict=True)
    return [t - version for version, start, end in spans for _ in range(start, end)]


def row_of(rollout: Rollout, advantage: float, t: int, *, one_sided: bool = False) -> Row:
    """A rollout for a learner that is at v_t. `one_sided`: what quantised weights sampled gets no weight above 1;
    what another model has never does."""
    borrowed = rollout.work_item.startswith(BORROWED)
    return Row(
        rollout.prompt_ids,
        rollout.completion_ids,
        rollout.logprobs,
        advantage,
        [NO_LAG] * len(rollout.completion_ids) if borrowed else token_lags(rollout, t),
        borrowed or (one_sided and rollout.quantisation is not None),
        rollout.generated,
    )


def split(lengths: Sequence[int], limit: int, *, packed: bool = False) -> list[list[int]]:
    """Row numbers by micro-batch: longest first, as many as fit in `limit` tokens (padded, unless `packed`), at least
    one."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _fill(order, lengths, limit) if packed else _pad(order, lengths, limit)


def _pad(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    batches: list[list[int]] = []
    width = 0
    for i in order:
        if batches and (len(batches[-1]) + 1) * width <= limit:
            batches[-1].append(i)
        else:
            batches.append([i])
            width = lengths[i]
    return batches


def _fill(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """First fit: each row goes into the first micro-batch that has room."""
    batches: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((n for n, left in enumerate(room) if lengths[i] <= left), None)
        if place is None:
            batches.append([i])
            room.append(limit - lengths[i])
        else:
            batches[place].append(i)
            room[place] -= lengths[i]
    return batches


def share(lengths: Sequence[int], ranks: int, limit: int, *, packed: bool = False) -> list[list[list[int]]]:
    """Row numbers by rank and micro-batch. All ranks get as many micro-batches; an empty one is a pass for nothing.

    Longest first, each row to the rank that has the fewest tokens by then.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]) if ranks > 1 else range(len(lengths)):
        rank = tokens.index(min(tokens))
        dealt[rank].append(i)
        tokens[rank] += lengths[i]
    plans = [
        [[rows[i] for i in batch] for batch in split([lengths[i] for i in rows], limit, packed=packed)]
        for rows in dealt
    ]
    passes = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(passes - len(plan))] for plan in plans]


def collate(rows: Sequence[Row], device: torch.device, *, packed: bool = False) -> MicroBatch:
    """Tensors of one micro-batch. Causal attention makes a mask for padding on the right unnecessary."""
    starts = [0, *itertools.accumulate(r.length for r in rows)] if packed else [0] * len(rows)
    ids = np.zeros((1, starts[-1]) if packed else (len(rows), max(r.length for r in rows)), dtype=np.int64)
    places = np.zeros_like(ids)
    positions, tokens, behaviour, lags = [], [], [], []
    for number, row in enumerate(rows):
        line, begin = (0, starts[number]) if packed else (number, 0)
        answer = np.array(row.completion_ids, dtype=np.int64)
        first = begin + len(row.prompt_ids)
        ids[line, begin:first] = row.prompt_ids
        ids[line, first : first + len(answer)] = answer
        places[line, begin : begin + row.length] = np.arange(row.length)
        own = slice(None) if row.generated is None else np.array(row.generated, dtype=bool)
        positions.append(np.arange(first - 1, first - 1 + len(answer))[own])
        tokens.append(answer[own])
        behaviour.append(np.array(row.logprobs, dtype=np.float32)[own])
        lags.append(np.array(row.lags, dtype=np.int64)[own])
    sizes = [len(t) for t in tokens]
    sequence = np.repeat(np.arange(len(rows)), sizes)

    def told(values: Sequence[np.ndarray] | np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(np.concatenate(values) if isinstance(values, list) else values), device)

    return MicroBatch(
        ids=told(ids),
        row=told(np.zeros_like(sequence) if packed else sequence),
        position=told(positions),
        sequence=told(sequence),
        token=told(tokens),
        behaviour=told(behaviour),
        advantage=told(np.repeat(np.array([r.advantage for r in rows], dtype=np.float32), sizes)),
        lag=told(lags),
        held=told(np.repeat(np.array([r.held for r in rows], dtype=bool), sizes)),
        first=min(len(r.prompt_ids) for r in rows) - 1,
        places=told(places) if packed else None,
    )


def completion_logprobs(model: object, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """log π of each token of the batch under the distribution that nodes sample from: softmax(logits / temperature).

    A packed row goes to the model without a mask: from places that begin anew it knows where an answer begins, and
    makes the mask, or the sequence lengths, that its kind of attention needs.
    """
    if batch.places is None:
        keep = batch.ids.shape[1] - batch.first
        logits = model(input_ids=batch.ids, use_cache=False, logits_to_keep=keep).logits  # type: ignore[operator]
        chosen = logits[batch.row, batch.position - batch.first].float()
    else:
        answer = model(  # type: ignore[operator]
            input_ids=batch.ids, position_ids=batch.places, use_cache=False, logits_to_keep=batch.position
        )
        chosen = answer.logits[0].float()
    if temperature != 1.0:  # the largest tensor of all: no copy of it for nothing
        chosen = chosen / temperature
    return torch.log_softmax(chosen, dim=-1).gather(1, batch.token[:, None])[:, 0]
