"""Log-probs, entropies and variances under given weights, as many tokens at a time as a training pass has.

Invariant: the distribution is the one that nodes sample from: softmax(logits / temperature).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.learner.audit.proofs import Match, matches
from app.protocol.proofs import before_head
from app.protocol.trajectory import Rollout

_POSITIONS = 512
"""Rows of logits that are in float32 at once."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One element a completion token of one rollout, float64 on the CPU."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    variance: torch.Tensor
    top: torch.Tensor
    """Log-prob of the likeliest token at each place."""
    proofs: tuple[Match, ...] = ()
    """One element a proof that the rollout came with."""


@torch.inference_mode()
def score(model: Any, rollouts: Sequence[Rollout], temperature: float, limit: int) -> list[Scored]:
    """Of each rollout all completion tokens. A pass has at most `limit` padded tokens, or one rollout."""
    found: list[Scored | None] = [None] * len(rollouts)
    for batch in _batches([len(r.prompt_ids) + len(r.completion_ids) for r in rollouts], limit):
        for i, scored in zip(batch, _pass(model, [rollouts[i] for i in batch], temperature), strict=True):
            found[i] = scored
    return [f for f in found if f is not None]


def _batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Longest first; the first of a batch says how wide it is."""
    batch: list[int] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * width > limit:
            yield batch
            batch = []
        width = width if batch else lengths[i]
        batch.append(i)
    if batch:
        yield batch


def _pass(model: Any, rollouts: Sequence[Rollout], temperature: float) -> list[Scored]:
    width = max(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    first = min(len(r.prompt_ids) for r in rollouts) - 1
    # Causal attention makes a mask for padding on the right unnecessary.
    ids = torch.zeros((len(rollouts), width), dtype=torch.long)
    rows: list[int] = []
    places: list[int] = []
    tokens: list[int] = []
    for row, rollout in enumerate(rollouts):
        whole = [*rollout.prompt_ids, *rollout.completion_ids]
        ids[row, : len(whole)] = torch.tensor(whole)
        start = len(rollout.prompt_ids) - 1 - first
        rows += [row] * len(rollout.completion_ids)
        places += range(start, start + len(rollout.completion_ids))
        tokens += rollout.completion_ids
    with before_head(model, wanted=any(r.proofs for r in rollouts)) as hidden:
        logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=width - first).logits
    parts = []
    for begin in range(0, len(tokens), _POSITIONS):
        chosen = slice(begin, begin + _POSITIONS)
        part = logits[rows[chosen], places[chosen]].float() / temperature
        parts.append(_distribution(part, torch.tensor(tokens[chosen], device=part.device)))
    merged = [torch.cat(column) for column in zip(*parts, strict=True)]
    sizes = [len(r.completion_ids) for r in rollouts]
    scored = [Scored(*columns) for columns in zip(*(torch.split(m, sizes) for m in merged), strict=True)]
    if not hidden:
        return scored
    seen = zip(scored, rollouts, hidden[0], strict=True)
    return [replace(one, proofs=_proofs(rollout, states, first)) for one, rollout, states in seen]


def _proofs(rollout: Rollout, states: torch.Tensor, first: int) -> tuple[Match, ...]:
    """Of a rollout's proofs; `states` [positions, width] are those from position `first` on."""
    start = len(rollout.prompt_ids) - 1 - first
    own = [start + i for i, written in enumerate(rollout.written) if written]
    return matches(rollout.proofs or b"", states[own])


def _distribution(logits: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """log p of the token, entropy, variance of −log p, and log p of the likeliest token, of each row of logits
    [rows, vocabulary]."""
    logp = torch.log_softmax(logits, dim=-1)
    p = logp.exp()
    finite = logp.clamp(min=-1e4)  # 0 · −∞ is 0 here
    entropy = -(p * finite).sum(-1)
    second = (p * finite.square()).sum(-1)
    chosen = logp.gather(1, token[:, None])[:, 0]
    found = (chosen, entropy, second - entropy.square(), logp.amax(-1))
    return tuple(column.double().cpu() for column in found)
