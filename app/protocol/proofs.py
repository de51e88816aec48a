"""TOPLOC proofs (arXiv 2501.16007): the largest of the hidden states that some tokens were drawn from, in few bytes.

For each run of at most TOKENS tokens that the policy wrote, the hidden states before the model's head, one row a token,
are taken as one list of bfloat16; of the ones that are largest in amount, a polynomial over the integers modulo PRIME
goes through (index mod `modulus`, bits of the value). Whoever has the weights computes the hidden states again, and
looks whether the polynomial goes through theirs. For a run of TOKENS tokens this is the very format of the package
`toploc` (decode_batching_size 32, topk 128); shorter runs have fewer points, so that all are far from 0.

Invariant: what `parse` returns is safe to compute with, whoever wrote it: nothing in it is longer or larger than an
honest proof. Pure; a proof travels as a row of unsigned 16-bit words: tokens, points, modulus, coefficients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from app.protocol.errors import Refused

Proofs = Literal["none", "toploc"]
"""What a job asks of its nodes, or an engine can give."""
Integers = npt.NDArray[np.int64]

PRIME = 65497
"""The largest prime below 2¹⁶ that leaves out no bfloat16 but negative NaNs."""
LEAST_MODULUS = 1 << 15
"""A smaller one lets one value stand for many places; 128 of them are told apart by far larger ones."""
TOKENS = 32
POINTS = 128
SHARE = 8
"""One value in so many goes into a proof, at most POINTS: small values are mostly rounding."""
WORD = np.dtype("<u2")
_HEAD = 3


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Of the next `tokens` tokens that the policy wrote. `coefficients` [points] are those of x⁰, x¹, …"""

    tokens: int
    modulus: int
    coefficients: Integers


def points(tokens: int, width: int) -> int:
    """How many values a proof of so many tokens holds, of hidden states of `width` values each."""
    return max(1, min(POINTS, tokens * width // SHARE))


def prove(tokens: int, places: Integers, bits: Integers) -> list[Proof]:
    """Proofs of runs of `tokens` tokens each. `places`, `bits` [runs, points]: where in its run a value is, and its
    bfloat16 as a number from 0 to 2¹⁶ − 1. Raises ValueError if two places of a run can't be told apart."""
    moduli = [_modulus(row) for row in places]
    x = places % np.asarray(moduli, dtype=np.int64)[:, None]
    coefficients = _interpolate(x, bits % PRIME)
    return [Proof(tokens, modulus, row) for modulus, row in zip(moduli, coefficients, strict=True)]


def values(proof: Proof, places: Integers) -> Integers:
    """What a proof says that the values at some places are: bits of bfloat16."""
    x = places % proof.modulus
    y = np.zeros_like(x)
    for coefficient in proof.coefficients[::-1]:
        y = (y * x + coefficient) % PRIME
    return y


def pack(proofs: Iterable[Proof]) -> bytes:
    """Proofs in their order, as words."""
    rows = [[p.tokens, len(p.coefficients), p.modulus, *p.coefficients.tolist()] for p in proofs]
    return np.asarray([word for row in rows for word in row], dtype=WORD).tobytes()


def parse(words: bytes, most: int = 1 << 31) -> list[Proof]:
    """The proofs in some words, of at most so many tokens together. Raises Refused: `proofs`."""
    if len(words) % WORD.itemsize:
        raise Refused("proofs", "proofs are rows of 16-bit words")
    left = np.frombuffer(words, dtype=WORD).astype(np.int64)
    found: list[Proof] = []
    while len(left) and most >= 0:
        tokens, count, modulus = left[:_HEAD].tolist() if len(left) >= _HEAD else (0, 0, 0)
        coefficients = left[_HEAD : _HEAD + count]
        sane = 1 <= tokens <= TOKENS and 1 <= count <= POINTS and LEAST_MODULUS < modulus <= PRIME
        if not sane or len(coefficients) < count or coefficients.max() >= PRIME:
            raise Refused(
                "proofs",
                f"a proof has 1…{TOKENS} tokens, 1…{POINTS} coefficients below {PRIME} and a modulus above "
                f"{LEAST_MODULUS}; proof {len(found)} has not",
            )
        found.append(Proof(tokens, modulus, coefficients))
        left = left[_HEAD + count :]
        most -= tokens
    if most < 0:
        raise Refused("proofs", "there are proofs of more tokens than the policy wrote")
    return found


def check(words: bytes, written: Sequence[bool], span_starts: Sequence[int]) -> None:
    """Hold the proofs of a completion against its tokens: each token that the policy wrote (`written`) is in one proof,
    in their order, and no proof is of two versions. Raises Refused: `proofs`."""
    before = [0, *itertools.accumulate(map(int, written))]
    ends = list(itertools.accumulate(proof.tokens for proof in parse(words, before[-1])))
    if (ends[-1] if ends else 0) != before[-1]:
        raise Refused("proofs", f"proofs of {ends[-1] if ends else 0} tokens; the policy wrote {before[-1]}")
    torn = {before[start] for start in span_starts} - {0, *ends}
    if torn:
        raise Refused("proofs", f"a proof is of two versions, which change after {min(torn)} tokens of the policy")


def trimmed(words: bytes, tokens: int) -> tuple[int, bytes]:
    """The proofs of the first tokens, at most so many, and of how many they are: proofs can't be cut."""
    kept: list[Proof] = []
    covered = 0
    for proof in parse(words):
        if covered + proof.tokens > tokens:
            break
        kept.append(proof)
        covered += proof.tokens
    return covered, pack(kept)


@contextmanager
def before_head(model: Any, *, wanted: bool = True) -> Iterator[list[Any]]:
    """A list that holds, after each pass of a Hugging Face model, the hidden states [rows, positions, width] of those
    positions that its logits are of: what goes into its head. Not `wanted`: it stays empty, and nothing is done."""
    seen: list[Any] = []
    if not wanted:
        yield seen
        return

    def keep(_: Any, inputs: tuple[Any, ...]) -> None:
        seen[:] = inputs[:1]

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def _modulus(places: Integers) -> int:
    for modulus in range(PRIME, LEAST_MODULUS, -1):
        if len(np.unique(places % modulus)) == len(places):
            return modulus
    raise ValueError("two places are one")


def _interpolate(x: Integers, y: Integers) -> Integers:
    """Coefficients [rows, points] of the polynomials through (x, y) modulo PRIME, by Newton's divided differences; the
    x of a row differ modulo PRIME."""
    count = x.shape[1]
    inverse = _inverses()
    divided = y.copy()
    for k in range(1, count):
        steps = inverse[(x[:, k:] - x[:, :-k]) % PRIME]
        divided[:, k:] = (divided[:, k:] - divided[:, k - 1 : -1]) * steps % PRIME
    coefficients = np.zeros_like(y)
    for k in range(count - 1, -1, -1):
        # Horner: what there is, times (x − x_k), plus the k-th difference.
        shifted = np.roll(coefficients, 1, axis=1)
        shifted[:, 0] = 0
        coefficients = (shifted - coefficients * x[:, k : k + 1]) % PRIME
        coefficients[:, 0] = (coefficients[:, 0] + divided[:, k]) % PRIME
    return coefficients


@cache
def _inverses() -> Integers:
    """Of 1 … PRIME − 1 modulo PRIME; [0] is of no use."""
    found = [0, 1]
    for n in range(2, PRIME):
        found.append((PRIME - PRIME // n) * found[PRIME % n] % PRIME)
    return np.asarray(found, dtype=np.int64)
