"""Copied and replayed groups: what chance makes is let through, what it doesn't is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from app.protocol import copies
from app.protocol.copies import Sample, copied, fingerprint, packed
from app.protocol.errors import Refused
from app.protocol.trajectory import Rollout, encode, read_table


def _sample(tokens: Sequence[int], logprob: float) -> Sample:
    return Sample(packed(tokens), logprob)


def _honest(rng: np.random.Generator, *, n: int, tokens: int, vocabulary: int, sharpness: float) -> list[Sample]:
    """A group as an honest node samples it, each position from the same distribution."""
    logits = sharpness * rng.standard_normal(vocabulary)
    logp = logits - np.log(np.exp(logits).sum())
    drawn = rng.choice(vocabulary, size=(n, tokens), p=np.exp(logp))
    return [_sample(row, float(logp[row].sum())) for row in drawn]


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 10.0], ids=["uniform", "high", "low", "nearly-greedy"])
@pytest.mark.parametrize("n", [2, 8, 64])
def test_an_honest_sampler_is_never_taken_for_a_copier(n: int, tokens: int, sharpness: float) -> None:
    rng = np.random.default_rng([n, tokens, int(sharpness * 10)])
    for _ in range(60):
        assert copied(_honest(rng, n=n, tokens=tokens, vocabulary=300, sharpness=sharpness)) == 0


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 10.0], ids=["uniform", "high", "low", "nearly-greedy"])
@pytest.mark.parametrize("n", [2, 8])
def test_fresh_groups_of_one_prompt_are_never_taken_for_replays(n: int, tokens: int, sharpness: float) -> None:
    seen: set[str] = set()
    rng = np.random.default_rng([n, tokens, int(sharpness * 10), 1])
    logits = sharpness * rng.standard_normal(300)
    logp = logits - np.log(np.exp(logits).sum())
    for _ in range(300):
        drawn = rng.choice(300, size=(n, tokens), p=np.exp(logp))
        found = fingerprint(7, [_sample(row, float(logp[row].sum())) for row in drawn])
        assert found is None or found not in seen
        seen |= set() if found is None else {found}


def test_the_bound_on_copies_holds_where_it_is_tight() -> None:
    # Two equal samples among n, uniform over V: the bound is C(n,2)/V, the truth just below it.
    rng, vocabulary, n, rounds = np.random.default_rng(3), 50, 3, 20_000
    drawn = np.sort(rng.integers(vocabulary, size=(rounds, n)), axis=1)
    share = float((np.diff(drawn, axis=1) == 0).any(axis=1).mean())
    bound = math.exp(copies.log_chance_of_copies(n, 2, -math.log(vocabulary)))
    assert 0.8 * bound < share <= bound * 1.05


def test_the_bounds_are_those_of_the_text() -> None:
    """C(n,k)·p^(k−1) and n!·Π p; a log-prob that rounding has put above 0 is 0."""
    assert math.exp(copies.log_chance_of_copies(8, 3, math.log(0.1))) == pytest.approx(56 * 0.01)
    assert math.exp(copies.log_chance_of_replay([math.log(0.1), math.log(0.2), math.log(0.5)])) == pytest.approx(0.06)
    assert math.exp(copies.log_chance_of_copies(8, 2, 1e-5)) == pytest.approx(28, abs=1e-9)
    assert copies.log_chance_of_replay([1e-5]) == 0.0


@pytest.mark.parametrize(
    ("group", "times"),
    [
        ([_sample((1, 2), -0.3)] * 8, 0),  # a short confident answer
        ([_sample((1,), -3.0)] * 8, 8),  # 5 % each, eight times
        ([_sample((1,), -3.0)] * 3 + [_sample((i,), -3.0) for i in range(2, 7)], 0),
        ([_sample(tuple(range(40)), -60.0)] * 2 + [_sample((i,), -1.0) for i in range(6)], 2),
        ([_sample((1, 2, 3), -60.0), _sample((1, 2, 4), -60.0)], 0),
        ([_sample((1,), -1e-9)] * 1024, 0),
        # Of two versions, one of which found it likely.
        ([_sample((1, 2), -60.0), _sample((1, 2), -0.5)], 0),
    ],
)  # fmt: skip
def test_copies_are_told_by_their_own_log_probs(group: list[Sample], times: int) -> None:
    assert copied(group) == times


def test_the_fingerprint_is_that_of_the_samples_in_any_order_and_of_the_prompt() -> None:
    group = [_sample((1, 2, 3), -20.0), _sample((4,), -11.0), _sample((5, 6), -9.0)]
    found = fingerprint(3, group)
    assert found is not None
    assert fingerprint(3, group[::-1]) == found
    assert fingerprint(4, group) != found
    assert fingerprint(3, [*group[:2], _sample((5, 7), -9.0)]) != found
    # Tokens can't wander from one completion to the next.
    assert fingerprint(3, [_sample((1, 2), -20.0), _sample((3, 4), -11.0), _sample((5, 6), -9.0)]) != found
    assert fingerprint(3, [_sample((1, 2), -0.2), _sample((1, 2), -0.2)]) is None


def _row(item: str, sample: int, tokens: list[int], logprob: float, prompt: int = 5) -> Rollout:
    return Rollout(item, prompt, sample, [1], tokens, [logprob / len(tokens)] * len(tokens), [0], [0], 1.0, "stop")


def test_a_file_is_checked_group_by_group() -> None:
    table = read_table(
        encode(
            [_row("a", 0, [1, 2, 3], -30.0), _row("a", 1, [9], -0.1), _row("b", 0, [4], -0.1), _row("b", 1, [4], -0.1)]
        )
    )
    prints = copies.check(table)
    assert set(prints) == {"a"}
    assert prints["a"] == fingerprint(5, [_sample((9,), -0.1), _sample((1, 2, 3), -30.0)])
    with pytest.raises(Refused, match="same completion 2 times") as refused:
        copies.check(read_table(encode([_row("a", 0, [1, 2], -30.0), _row("a", 1, [1, 2], -30.0)])))
    assert refused.value.reason == "copied"
    twice = [_row(item, s, [1 + s, 2, 3], -30.0) for item in ("a", "b") for s in range(2)]
    with pytest.raises(Refused, match="another one in the same file") as refused:
        copies.check(read_table(encode(twice)))
    assert refused.value.reason == "replayed"
