"""Copied and replayed groups: what chance makes is let through, what it doesn't is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from app.protocol import copies
from app.protocol.copies import Prints, Sample, copied, fingerprint, packed, prints, replayed
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
@pytest.mark.parametrize("n", [2, 8, 64])
def test_fresh_groups_of_one_prompt_are_never_taken_for_replays(n: int, tokens: int, sharpness: float) -> None:
    seen: dict[str, str] = {}
    rng = np.random.default_rng([n, tokens, int(sharpness * 10), 1])
    logits = sharpness * rng.standard_normal(300)
    logp = logits - np.log(np.exp(logits).sum())
    for known in range(0, 300 * n, n):
        drawn = rng.choice(300, size=(n, tokens), p=np.exp(logp))
        found = prints(7, [_sample(row, float(logp[row].sum())) for row in drawn], n)
        assert not replayed(found, seen, known, n)
        seen |= {name: str(known) for name in found.rare if name not in seen}


def of(group: Prints, holder: str = "w0") -> dict[str, str]:
    """What is on record after a group."""
    return dict.fromkeys(group.rare, holder)


def test_a_policy_that_learnt_its_answers_by_heart_gives_them_again() -> None:
    """What was unlikely when it came first is likely now; it is today's log-prob that counts."""
    first, again, half = (prints(7, [_sample(range(i, i + 40), p) for i in range(8)], 8) for p in (-60.0, -2.5, -3.2))
    assert (len(first.rare), len(again.rare)) == (8, 0)
    assert not replayed(again, of(first), 8, 8)
    assert not replayed(half, of(first), 8, 8)


@pytest.mark.parametrize(("logprob", "caught"), [(-60.0, True), (-28.0, True), (-24.0, False), (-4.0, False)])
def test_one_copied_completion_is_enough_if_it_is_unlikely(logprob: float, caught: bool) -> None:
    copy = [_sample((1, 2, 3), logprob), *[_sample((9, i), -60.0) for i in range(7)]]
    assert replayed(prints(7, copy, 8), of(prints(7, [_sample((1, 2, 3), -30.0)], 8)), 8, 8) is caught


def test_short_completions_add_up() -> None:
    short = prints(7, [_sample((i,), -4.5) for i in range(8)], 8)
    assert replayed(short, of(short), 8, 8)
    assert not replayed(short, dict(list(of(short).items())[:4]), 8, 8)
    # Of groups that came long ago more have to be alike, unless they are all of one group.
    seven = prints(7, [_sample((i,), -7.0) for i in range(8)], 8)
    assert replayed(seven, of(seven), 80, 8)
    assert not replayed(seven, {name: f"w{n}" for n, name in enumerate(seven.rare)}, 80, 8)
    longer = prints(7, [_sample((i,), -9.0) for i in range(8)], 8)
    assert replayed(longer, {name: f"w{n}" for n, name in enumerate(longer.rare)}, 80, 8)


def test_the_bound_on_copies_holds_where_it_is_tight() -> None:
    # Two equal samples among n, uniform over V: the bound is C(n,2)/V, the truth just below it.
    rng, vocabulary, n, rounds = np.random.default_rng(3), 50, 3, 20_000
    drawn = np.sort(rng.integers(vocabulary, size=(rounds, n)), axis=1)
    share = float((np.diff(drawn, axis=1) == 0).any(axis=1).mean())
    bound = math.exp(copies.log_chance_of_copies(n, 2, -math.log(vocabulary)))
    assert 0.8 * bound < share <= bound * 1.05


def test_the_bounds_are_those_of_the_text() -> None:
    """C(n,k)·p^(k−1) and C(m,k)·n!/(n−k)!·Π p; a log-prob that rounding has put above 0 is 0."""
    assert math.exp(copies.log_chance_of_copies(8, 3, math.log(0.1))) == pytest.approx(56 * 0.01)
    small = [math.log(1e-3), math.log(2e-3), math.log(5e-3)]
    assert math.exp(copies.log_chance_of_replay(small, 3, 3)) == pytest.approx(6 * 1e-8)
    assert math.exp(copies.log_chance_of_replay(small[:2], 8, 24)) == pytest.approx(276 * 56 * 2e-6)
    # One that says nothing is left out.
    assert math.exp(copies.log_chance_of_replay([math.log(1e-6), 0.0], 8, 8)) == pytest.approx(64e-6)
    assert math.exp(copies.log_chance_of_copies(8, 2, 1e-5)) == pytest.approx(28, abs=1e-9)
    assert copies.log_chance_of_replay([1e-5], 1, 1) == 0.0


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


def test_who_chose_from_many_samples_has_more_of_a_kind_to_choose_from() -> None:
    """A job that prunes: two equal answers among four that were kept of sixty-four."""
    group = [_sample((1,), -23.0), _sample((1,), -23.0), _sample((2,), -9.0), _sample((3,), -9.0)]
    assert (copied(group), copied(group, 64)) == (2, 0)


def test_a_fingerprint_is_that_of_a_completion_and_its_prompt() -> None:
    group = [_sample((1, 2, 3), -20.0), _sample((4,), -11.0), _sample((5, 6), -9.0), _sample((7,), -0.1)]
    found = prints(3, group, 4)
    assert found.rare == {fingerprint(3, s.tokens): s.logprob for s in group[:3]}
    assert prints(3, group[::-1], 4) == found
    assert not set(prints(4, group, 4).rare) & set(found.rare)
    # Of two versions, one of which found it likely.
    assert not prints(3, [_sample((1,), -60.0), _sample((1,), -0.5)], 2).rare


def _row(item: str, sample: int, tokens: list[int], logprob: float, prompt: int = 5) -> Rollout:
    return Rollout(item, prompt, sample, [1], tokens, [logprob / len(tokens)] * len(tokens), [0], [0], 1.0, "stop")


def test_a_file_is_checked_group_by_group() -> None:
    table = read_table(
        encode(
            [_row("a", 0, [1, 2, 3], -30.0), _row("a", 1, [9], -0.1), _row("b", 0, [4], -0.1), _row("b", 1, [4], -0.1)]
        )
    )
    found = copies.check(table, {"a": 2, "b": 4})
    assert found["a"] == prints(5, [_sample((9,), -0.1), _sample((1, 2, 3), -30.0)], 2)
    assert (found["b"].rare, found["b"].sampled) == ({}, 4)
    with pytest.raises(Refused, match="same completion 2 times") as refused:
        copies.check(read_table(encode([_row("a", 0, [1, 2], -30.0), _row("a", 1, [1, 2], -30.0)])), {"a": 2})
    assert refused.value.reason == "copied"
