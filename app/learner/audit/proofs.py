"""Proofs of hidden states (`app.protocol.proofs`), held against the states of the same pass that gives the log-probs.

A proof misses a hidden state if what it says of its place has another sign, or is more than NEAR steps of bfloat16 away
(a step is 1/256 to 1/128 of the value). Only the larger half of the points is looked at: two honest computations agree
on which those are, while they don't agree on the last of the proof's own.

Invariant: a proof that has not as many points as it should misses all of them; nothing is said of tokens without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app.protocol.proofs import Integers, Proof, parse, points, values
from app.protocol.trajectory import Rollout

NEAR = 4
"""Rounding to bfloat16 in each of 30 layers moves 1 in 8 values by more than 2 steps, and 1 in 70 by more than 4."""
_SIGN = 1 << 15


@dataclass(frozen=True, slots=True)
class Match:
    """What came of one proof, or of several."""

    points: int
    misses: int


def matches(words: bytes, hidden: torch.Tensor) -> tuple[Match, ...]:
    """Of each proof of a completion; `hidden` [tokens that the policy wrote, width]. Raises Refused."""
    found = []
    start = 0
    for proof in parse(words):
        found.append(match(proof, hidden[start : start + proof.tokens]))
        start += proof.tokens
    return tuple(found)


def match(proof: Proof, hidden: torch.Tensor) -> Match:
    """Hold one proof against the hidden states [its tokens, width] as they were computed again."""
    wanted = points(proof.tokens, hidden.shape[-1])
    looked = (wanted + 1) // 2
    if len(proof.coefficients) != wanted or len(hidden) != proof.tokens:
        return Match(looked, looked)
    flat = hidden.to(torch.bfloat16).flatten()
    places = flat.abs().topk(looked).indices
    own = bits(flat[places])
    return Match(looked, int(np.count_nonzero(steps(values(proof, places.cpu().numpy()), own) > NEAR)))


def steps(one: Integers, other: Integers) -> Integers:
    """How many bfloat16 lie between numbers that are given by their bits; 2¹⁶ where the signs differ."""
    apart: Integers = np.abs(one % _SIGN - other % _SIGN)
    return np.where((one < _SIGN) == (other < _SIGN), apart, 2 * _SIGN)


def bits(numbers: torch.Tensor) -> Integers:
    """Bits of bfloat16 numbers, 0 … 2¹⁶ − 1."""
    raw: Any = numbers.view(torch.int16).cpu().numpy()
    return np.asarray(raw, dtype=np.int64) % (2 * _SIGN)


def of_version(
    found: Sequence[Match], rollout: Rollout, token_versions: Sequence[int], version: int
) -> Iterator[Match]:
    """What came of a rollout's proofs, one element each: of those whose tokens, which are all of one version, claim
    this one."""
    if not found:
        return
    own = [v for v, written in zip(token_versions, rollout.written, strict=True) if written]
    start = 0
    for proof, one in zip(parse(rollout.proofs or b""), found, strict=True):
        if own[start] == version:
            yield one
        start += proof.tokens


def together(found: Sequence[Match]) -> Match:
    """Several proofs as one."""
    return Match(sum(m.points for m in found), sum(m.misses for m in found))
