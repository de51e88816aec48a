"""Group sizes by prompt."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.group_sizes import Tried, gain, sizes, value
from app.protocol.job import BatchSpec, GroupPolicy

VARYING: list[GroupPolicy] = ["coba", "cures"]
tried = st.integers(0, 200).flatmap(lambda n: st.floats(0, 1).map(lambda p: Tried(successes=p * n, tries=n)))


@given(
    policy=st.sampled_from(["uniform", *VARYING]),
    prompts=st.lists(tried, max_size=40),
    size=st.integers(2, 16),
    room=st.tuples(st.integers(0, 14), st.sampled_from([0, 1, 2, 5, 60])),
    failure=st.none() | st.floats(0, 1),
)
def test_a_window_always_has_r_rollouts_within_the_bounds(
    policy: GroupPolicy, prompts: list[Tried], size: int, room: tuple[int, int], failure: float | None
) -> None:
    least, most = max(1, size - room[0]), size + room[1]
    found = sizes(policy, prompts, group_size=size, least=least, most=most, failure_rate=failure)
    assert len(found) == len(prompts)
    assert sum(found) == size * len(prompts)
    assert all(least <= n <= most for n in found)


@pytest.mark.parametrize("policy", VARYING)
@given(prompts=st.lists(tried, min_size=2, max_size=30), failure=st.floats(0, 1))
def test_more_informative_prompts_never_get_less(policy: GroupPolicy, prompts: list[Tried], failure: float) -> None:
    found = sizes(policy, prompts, group_size=8, least=2, most=32, failure_rate=failure)

    def worth(t: Tried) -> float:
        return t.p * (1 - t.p) if policy == "cures" else value(t.p, failure)

    ranked = sorted(zip(map(worth, prompts), found, strict=True), key=lambda pair: pair[0])
    for (low, few), (high, many) in itertools.pairwise(ranked):
        if high > low * (1 + 1e-9):
            assert few <= many
        else:
            # Equals differ by the one completion that could not be divided.
            assert abs(few - many) <= 1


def test_cures_is_in_proportion_to_sigma() -> None:
    # p̂ of 1/2 and 1/10: σ is 0.5 and 0.3.
    prompts = [Tried(49, 98), Tried(9, 98)]
    assert [t.p for t in prompts] == [0.5, 0.1]
    assert sizes("cures", prompts, group_size=8, least=2, most=14) == [10, 6]
    # Shares of 5.71 and 3.43 are rounded to the nearest: what is large is not favoured.
    prompts = [Tried(49, 98), Tried(9, 98), Tried(9, 98), Tried(9, 98)]
    assert sizes("cures", prompts, group_size=4, least=2, most=14) == [6, 4, 3, 3]
    # Of 10 and five times 2.8: all that is small is rounded up before what is large.
    prompts = [Tried(49, 98), *[Tried(1, 98)] * 5]
    assert sizes("cures", prompts, group_size=4, least=1, most=24) == [9, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("policy", VARYING)
def test_nobody_gets_more_than_the_most(policy: GroupPolicy) -> None:
    prompts = [Tried(500, 1000), *[Tried(0, 1000)] * 3]
    assert sizes(policy, prompts, group_size=4, least=2, most=5, failure_rate=0.5) == [5, 4, 4, 3]


def test_nothing_known_is_uniform() -> None:
    for policy in VARYING:
        assert sizes(policy, [Tried()] * 5, group_size=8, least=2, most=32) == [8] * 5


def test_uniform_is_the_same_for_all_whatever_is_known() -> None:
    prompts = [Tried(0, 100), Tried(50, 100), Tried(100, 100)]
    assert sizes("uniform", prompts, group_size=8, least=2, most=32, failure_rate=0.5) == [8, 8, 8]


def test_the_failure_rate_moves_what_coba_takes_for_worthwhile() -> None:
    hard, easy = Tried(20, 98), Tried(80, 98)
    struggling = sizes("coba", [hard, easy], group_size=8, least=2, most=14, failure_rate=0.8)
    succeeding = sizes("coba", [hard, easy], group_size=8, least=2, most=14, failure_rate=0.2)
    assert struggling[0] < struggling[1]
    assert succeeding[0] > succeeding[1]
    hopeless = sizes("coba", [Tried(0, 500), Tried(250, 500)], group_size=8, least=2, most=14, failure_rate=0.5)
    assert hopeless[0] < hopeless[1]


@pytest.mark.parametrize(
    ("failure_rate", "best"), [(0.0, 0.25), (0.25, 0.25), (0.5, 0.5), (0.7, 0.7), (0.75, 0.75), (1.0, 0.75)]
)
def test_for_coba_a_success_rate_like_the_failure_rate_is_worth_most_within_bounds(
    failure_rate: float, best: float
) -> None:
    assert value(best, failure_rate) == pytest.approx(1.0)
    rates = [n / 100 for n in range(101)]
    worths = [value(p, failure_rate) for p in rates]
    assert worths[: round(100 * best) + 1] == sorted(worths[: round(100 * best) + 1])
    assert worths[round(100 * best) :] == sorted(worths[round(100 * best) :], reverse=True)
    assert 0 < min(worths[0], worths[-1]) < 1e-3, "what nobody, or everybody, gets right teaches nearly nothing"


def test_for_coba_each_completion_adds_less_and_eight_make_two_thirds() -> None:
    gains = [gain(0.5, n) for n in range(1, 1000)]
    assert gains == sorted(gains, reverse=True)
    assert sum(gains) == pytest.approx(0.5)
    assert sum(gains[:8]) == pytest.approx(0.5 * 0.632, rel=1e-3)


def test_where_no_failures_are_known_coba_takes_half_for_the_rate() -> None:
    prompts = [Tried(50, 98), Tried(80, 98), Tried(20, 98)]
    unknown = sizes("coba", prompts, group_size=8, least=2, most=14)
    assert unknown == sizes("coba", prompts, group_size=8, least=2, most=14, failure_rate=0.5)
    assert unknown[0] == max(unknown) > unknown[1]


def test_bounds_that_exclude_the_group_size_are_an_error() -> None:
    with pytest.raises(ValueError, match="must lie within"):
        sizes("coba", [Tried()], group_size=8, least=9, most=12)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"min_group": 2}, "need a group_policy"),
        ({"group_policy": "coba", "prune": "shuffle_r1"}, "prune leaves out the rewards"),
        ({"group_policy": "cures", "group_size": 8, "max_group": 6}, "must lie within"),
        ({"group_policy": "cures", "group_size": 4, "min_group": 6}, "must lie within"),
    ],
)
def test_a_job_says_what_does_not_go_together(batch: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSpec.model_validate(batch)


def test_default_bounds() -> None:
    assert BatchSpec(group_size=8).group_bounds == (8, 8)
    assert BatchSpec(group_size=8, group_policy="coba").group_bounds == (2, 32)
