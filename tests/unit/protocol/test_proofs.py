"""Proofs come from strangers: they go through what they were made of, and nothing that is not one is taken for one."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.protocol.errors import Refused
from app.protocol.proofs import (
    LEAST_MODULUS,
    POINTS,
    PRIME,
    TOKENS,
    WORD,
    Proof,
    check,
    pack,
    parse,
    points,
    prove,
    trimmed,
    values,
)

PLACES = st.lists(st.integers(0, 32 * 16384 - 1), min_size=1, max_size=POINTS, unique=True)


def proof(tokens: int = 3, count: int = 4) -> Proof:
    return prove(tokens, np.arange(count)[None] * 7, np.arange(count)[None] * 1000)[0]


def words(*lists: list[int]) -> bytes:
    return np.asarray([w for row in lists for w in row], dtype=WORD).tobytes()


def reason(data: bytes, most: int = 100) -> str:
    with pytest.raises(Refused) as caught:
        parse(data, most)
    assert len(caught.value.detail) < 300
    return caught.value.reason


@settings(max_examples=40, deadline=None)
@given(PLACES, st.randoms(use_true_random=False))
def test_a_proof_goes_through_its_points_and_travels(places: list[int], random: Any) -> None:
    bits = [random.randrange(PRIME) for _ in places]
    [made] = prove(5, np.asarray([places]), np.asarray([bits]))
    [again] = parse(pack([made]), 5)
    assert (again.tokens, again.modulus) == (5, made.modulus)
    assert values(again, np.asarray(places)).tolist() == bits


def test_it_is_the_polynomial_of_the_toploc_package() -> None:
    """Coefficients as `toploc` 0.1.6 (`compute_newton_coefficients`) gives them."""
    places, bits = [3, 17, 40000, 65530, 81000, 163839], [16398, 49165, 16392, 49159, 0, 65496]
    [made] = prove(32, np.asarray([places]), np.asarray([bits]))
    assert made.modulus == 65497
    assert made.coefficients.tolist() == [20238, 47772, 3589, 37880, 27045, 50726]
    [moved] = prove(32, np.asarray([[5, 65502, 9]]), np.asarray([[1, 2, 3]]))
    assert moved.modulus == 65496, "5 and 65502 are one modulo 65497"
    assert moved.coefficients.tolist() == [65488, 10919, 10916]


@pytest.mark.parametrize(
    ("seed", "modulus", "digest"),
    [
        (0, 65497, "1514aa12010b3ba231bfe7244c6b2e02"),
        (5, 65496, "f00d78f2162a19fb81f007ba81b1da19"),
        (32, 65496, "bc22ec48e4d6c3b9271dc8d900eaf230"),
    ],
)
def test_it_has_the_bits_of_the_toploc_package(seed: int, modulus: int, digest: str) -> None:
    """As `ProofPoly.from_points(…).to_bytes()` of `toploc` 0.1.6 for the same points; it puts high bytes first."""
    random = np.random.default_rng(seed)
    places, bits = np.sort(random.permutation(32 * 5120)[:POINTS]), random.integers(0, PRIME, POINTS)
    [made] = prove(32, places[None], bits[None])
    assert made.modulus == modulus
    theirs = np.asarray([made.modulus, *made.coefficients], dtype=">u2").tobytes()
    assert hashlib.blake2b(theirs, digest_size=16).hexdigest() == digest


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (TOKENS, POINTS)])
def test_the_shortest_and_the_longest_proof_are_read(tokens: int, count: int) -> None:
    [again] = parse(pack([proof(tokens, count)]), tokens)
    assert (again.tokens, len(again.coefficients)) == (tokens, count)


def test_many_proofs_at_once_are_those_of_each_alone() -> None:
    random = np.random.default_rng(1)
    places = np.stack([random.permutation(32 * 5120)[:POINTS] for _ in range(30)])
    bits = random.integers(0, PRIME, places.shape)
    together = prove(32, places, bits)
    assert len({p.modulus for p in together}) > 1, "the case needs places that are one modulo 65497"
    for one, row, its in zip(together, places, bits, strict=True):
        [alone] = prove(32, row[None], its[None])
        assert alone.modulus == one.modulus
        assert alone.coefficients.tolist() == one.coefficients.tolist()


@pytest.mark.parametrize(
    ("tokens", "width", "expected"),
    [(32, 32, 128), (32, 4096, 128), (1, 4096, 128), (1, 576, 72), (2, 32, 8), (1, 4, 1)],
)
def test_short_runs_have_few_points(tokens: int, width: int, expected: int) -> None:
    assert points(tokens, width) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        words([1]),
        words([1, 1, PRIME]),
        words([0, 1, PRIME, 5]),
        words([TOKENS + 1, 1, PRIME, 5]),
        words([1, 0, PRIME]),
        words([1, POINTS + 1, PRIME, *[5] * (POINTS + 1)]),
        words([1, 2, PRIME, 5]),
        words([1, 1, 0, 5]),
        words([1, 1, 1, 5]),
        words([1, 1, LEAST_MODULUS, 5]),
        words([1, 1, PRIME + 1, 5]),
        words([1, 1, PRIME, PRIME]),
        words([1, 1, PRIME, 5], [1, 1, 0, 5]),
        words(*[[TOKENS, 1, PRIME, 5]] * 4),
    ],
)
def test_what_is_no_proof_is_refused(data: bytes) -> None:
    assert reason(data) == "proofs"


@given(st.binary(max_size=600))
def test_no_bytes_do_more_than_to_be_refused(data: bytes) -> None:
    try:
        found = parse(data, 1000)
    except Refused:
        return
    for one in found:
        assert values(one, np.arange(3)).max() < PRIME


OWN = [True] * 3 + [False] * 2 + [True] * 4


@pytest.mark.parametrize(
    ("tokens", "starts", "said"),
    [
        ([3, 4], [0], ""),
        ([7], [0], ""),
        ([3, 2, 2], [0, 7], ""),
        ([3, 4], [0, 4], ""),
        ([3, 4], [0, 7], "two versions"),
        ([3, 3], [0], "6 tokens"),
        ([3, 5], [0], "more tokens"),
        ([], [0], "0 tokens"),
    ],
)
def test_proofs_are_of_each_own_token_and_of_one_version(tokens: list[int], starts: list[int], said: str) -> None:
    data = pack([proof(n) for n in tokens])
    if not said:
        check(data, OWN, starts)
        return
    with pytest.raises(Refused, match=said) as caught:
        check(data, OWN, starts)
    assert caught.value.reason == "proofs"


@pytest.mark.parametrize(("tokens", "kept"), [(0, 0), (2, 0), (3, 3), (6, 3), (7, 7), (8, 8), (99, 8)])
def test_proofs_are_cut_between_two(tokens: int, kept: int) -> None:
    whole = [proof(n) for n in (3, 4, 1)]
    count, data = trimmed(pack(whole), tokens)
    assert count == kept
    ends = list(itertools.accumulate(p.tokens for p in parse(data)))
    assert (ends[-1] if ends else 0) == kept
    assert pack(whole).startswith(data)
