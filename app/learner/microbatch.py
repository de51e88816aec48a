"""Cutting a step into forward/backward passes that fit.

Invariant: every row is in exactly one micro-batch, and a micro-batch of more than one row has at most `limit` padded
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.protocol.trajectory import Rollout


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout as the trainer sees it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    lags: Sequence[int]
    """t − x of each completion token."""

    @property
    def length(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded rows and, one element a completion token, where its logits are and what belongs to it.

    `ids` [rows, width]; `row` and `position` index the logits that predict the token; `token`, `behaviour`,
    `advantage`, `lag` are 1-D. `first` is the smallest position.
    """

    ids: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    token: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    lag: torch.Tensor
    first: int


def token_lags(rollout: Rollout, t: int) -> list[int]:
    """t − x of each completion token, x the version that it was sampled from."""
    ends = [*rollout.span_starts[1:], len(rollout.completion_ids)]
    spans = zip(rollout.span_versions, rollout.span_starts, ends, strict=True)
    return [t - version for version, start, end in spans for _ in range(start, end)]


def split(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Row numbers by micro-batch: longest first, as many as fit in `limit` padded tokens, at least one."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    width = 0
    for i in order:
        if batches and (len(batches[-1]) + 1) * width <= limit:
            batches[-1].append(i)
        else:
            batches.append([i])
            width = lengths[i]
    return batches


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Tensors of one micro-batch. Causal attention makes a mask for padding on the right unnecessary."""
    width = max(r.length for r in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    where: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    lags: list[int] = []
    for number, row in enumerate(rows):
        ids[number, : row.length] = torch.tensor([*row.prompt_ids, *row.completion_ids])
        size, start = len(row.completion_ids), len(row.prompt_ids) - 1
        where += [number] * size
        positions += range(start, start + size)
        tokens += row.completion_ids
        behaviour += row.logprobs
        advantages += [row.advantage] * size
        lags += row.lags
    return MicroBatch(
        ids=ids.to(device),
        row=torch.tensor(where, device=device),
        position=torch.tensor(positions, device=device),
        token=torch.tensor(tokens, device=device),
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantage=torch.tensor(advantages, dtype=torch.float32, device=device),
        lag=torch.tensor(lags, device=device),
        first=min(len(r.prompt_ids) for r in rows) - 1,
    )


def completion_logprobs(model: object, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """log π of each completion token under the distribution that nodes sample from: softmax(logits / temperature)."""
    keep = batch.ids.shape[1] - batch.first
    logits = model(input_ids=batch.ids, use_cache=False, logits_to_keep=keep).logits  # type: ignore[operator]
    chosen = logits[batch.row, batch.position - batch.first].float()
    return torch.log_softmax(chosen / temperature, dim=-1).gather(1, batch.token[:, None])[:, 0]
