"""Pair pruning: what is kept of a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import Refused
from app.protocol.pruning import informative, kept
from app.protocol.trajectory import Expected, Rollout, encode, read_table, validate


@pytest.mark.parametrize(
    ("size", "left"), [(2, 2), (3, 2), (4, 2), (5, 2), (6, 4), (7, 4), (8, 4), (9, 4), (12, 6), (16, 8)]
)
def test_half_of_the_pairs_are_kept_and_at_least_one(size: int, left: int) -> None:
    assert kept(size, "shuffle_r1") == left
    assert kept(size, None) == size


@pytest.mark.parametrize(
    ("rewards", "indices"),
    [
        ([0.0, 0.5, 0.4, 1.0], [0, 3]),
        ([0.1, 0.9, 0.8, 0.2, 0.5, 0.5, 1.0, 0.0], [0, 1, 6, 7]),
        ([1.0, 1.0, 1.0, 0.0], [0, 3]),
        ([0.5, 1.0, 0.0], [1, 2]),
    ],
)
def test_best_and_worst_inwards(rewards: list[float], indices: list[int]) -> None:
    assert informative(rewards, "shuffle_r1") == indices


def test_a_job_that_does_not_prune_sends_every_sample() -> None:
    assert informative([0.5, 1.0, 0.0], None) == [0, 1, 2]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40))
def test_what_is_kept_is_at_least_as_far_from_the_middle_as_what_is_not(rewards: list[float]) -> None:
    left = informative(rewards, "shuffle_r1")
    assert len(left) == len(set(left)) == kept(len(rewards), "shuffle_r1")
    assert {max(rewards), min(rewards)} <= {rewards[i] for i in left}
    inside = [r for i, r in enumerate(rewards) if i not in left]
    above, below = sorted((rewards[i] for i in left), reverse=True)[: len(left) // 2], sorted(rewards[i] for i in left)
    for reward in inside:
        assert below[len(left) // 2 - 1] <= reward <= above[-1]


def _file(samples: list[int]) -> bytes:
    return encode([Rollout("i", 0, s, [1], [2], [-0.1], [0], [0], 0.5, "stop") for s in samples])


def test_a_pruned_file_has_exactly_so_many_samples_of_the_group() -> None:
    want = {"i": Expected(0, 8, rows=kept(8, "shuffle_r1"))}
    validate(read_table(_file([0, 3, 5, 7])), want, newest_version=0, max_tokens=8)
    for wrong in ([0, 3, 5], [0, 3, 5, 7, 1], [0, 3, 5, 8], [0, 3, 5, -1], [0, 3, 3, 5]):
        with pytest.raises(Refused, match="4 of the samples 0…7") as refused:
            validate(read_table(_file(wrong)), want, newest_version=0, max_tokens=8)
        assert refused.value.reason == "incomplete_group"
