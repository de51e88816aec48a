"""Which groups a node gets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet import dispatch
from app.fleet.dispatch import MARGIN, Candidate, Choice, Pace, Speeds, choose, predicted_length, window

PACE = Pace(step=10, staleness=3, step_s=10.0)
"""v10 stays admissible for 40 s, v9 for 30 s, v7 for 10 s; v6 is over."""


def _new(*tokens: float | None) -> list[Candidate]:
    return [Candidate(100 + i, t, fresh_tokens=t) for i, t in enumerate(tokens)]


def _given(candidates: Sequence[Candidate], **options: object) -> Choice:
    values: dict[str, object] = {"count": 10, "version": 10, "speeds": Speeds(1000.0, [1000.0]), "pace": PACE}
    return choose(candidates, **{**values, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speeds", "ordinals"),
    [
        (Speeds(1000.0, [100.0]), [102, 100, 101]),  # long first to the fast one
        (Speeds(100.0, [1000.0]), [101, 100, 102]),  # short first to the slow one
        (Speeds(1000.0), [102, 100, 101]),
        (Speeds(None, [1000.0]), [101, 100, 102]),  # nobody knows it
    ],
)
def test_long_ones_go_first_and_to_fast_nodes(speeds: Speeds, ordinals: list[int]) -> None:
    assert _given(_new(200, 100, 300), speeds=speeds).ordinals == ordinals


def test_without_lengths_the_order_is_the_seeded_one() -> None:
    assert _given(_new(None, None, None), count=2) == Choice([100, 101])


def test_begun_groups_go_first_the_oldest_before_others() -> None:
    begun = [Candidate(50, 80, partial_version=9, fresh_tokens=200), Candidate(60, 80, 8, 200)]
    assert _given([*begun, *_new(900, 100)]).ordinals == [60, 50, 100, 101]


@pytest.mark.parametrize(
    ("speed", "held", "ordinals"),
    [
        (100.0, 0.0, [101, 100]),  # 3200 tokens in 40 s at four fifths; 1000 + 2000 fit, 5000 don't
        (100.0, 1500.0, [101]),
        (100.0, 2900.0, []),
        (10.0, 0.0, []),
        (None, 0.0, [101, 100, 102]),
    ],
)
def test_a_slow_node_gets_what_it_can_finish(speed: float | None, held: float, ordinals: list[int]) -> None:
    found = _given(_new(2000, 1000, 5000), speeds=Speeds(speed, [10_000.0]), held_tokens=held)
    assert found.ordinals == ordinals
    assert bool(found.reason) is not bool(ordinals)
    assert ordinals or "admissible" in found.reason


def test_an_older_version_leaves_less_time() -> None:
    for version, ordinals in ((10, [101, 100]), (8, [101]), (7, [])):
        found = _given(_new(2000, 1000), version=version, speeds=Speeds(100.0, [10_000.0]))
        assert found.ordinals == ordinals


@pytest.mark.parametrize("speed", [None, 1000.0])
def test_under_a_version_that_is_over_a_node_gets_nothing_beside_what_it_has(speed: float | None) -> None:
    for waiting in (_new(None), _new(0.0)):
        assert _given(waiting, version=6, speeds=Speeds(speed, [1000.0]), held_tokens=1.0).ordinals == []


def test_what_nobody_can_finish_in_time_goes_to_who_asks_one_at_a_time() -> None:
    slow = Speeds(10.0, [10.0])
    assert _given(_new(5000, 5000), speeds=slow).ordinals == [100]
    assert _given(_new(5000, 5000), speeds=slow, held_tokens=1.0).ordinals == []
    # Another one could; but nothing is out at all: it does not work, and the learner waits.
    stuck = Speeds(10.0, [10_000.0])
    assert _given(_new(5000, 5000), speeds=stuck, ahead=3).ordinals == []
    assert _given(_new(5000, 5000), speeds=stuck, ahead=0).ordinals == [100]
    # Nor is one waited for whose version is so old that it may have no work.
    behind = Speeds(10.0, [10_000.0], [])
    assert _given(_new(5000, 5000), speeds=behind, ahead=3).ordinals == [100]


@pytest.mark.parametrize(
    ("version", "tokens", "lost"),
    [(6, 10, True), (7, 10, False), (7, 9000, True), (7, 7900, False), (9, 9000, False)],
)
def test_a_beginning_too_old_to_count_is_thrown_away_and_the_group_done_anew(
    version: int, tokens: float, lost: bool
) -> None:
    found = _given([Candidate(5, tokens, version, 9500)])
    assert found.dropped == ([5] if lost else [])
    assert found.ordinals == [5]


@pytest.mark.parametrize(("version", "lost"), [(5, True), (6, True), (7, False)])
def test_a_beginning_over_the_budget_is_thrown_away_also_where_lengths_are_not_known(version: int, lost: bool) -> None:
    assert _given([Candidate(5, None, version, None)]).dropped == ([5] if lost else [])


def test_a_beginning_that_this_node_is_too_slow_for_waits_for_a_faster_one() -> None:
    found = _given([Candidate(5, 3000, 7, 9500)], speeds=Speeds(100.0, [1000.0]))
    assert (found.ordinals, found.dropped) == ([], [])


candidate = st.builds(
    lambda tokens, begun, age: Candidate(0, tokens, 10 - age if begun else None, tokens * 2),
    tokens=st.floats(1, 1e5), begun=st.booleans(), age=st.integers(0, 5),
)  # fmt: skip
speeds_ = st.builds(Speeds, own=st.floats(1, 1e4), others=st.lists(st.floats(1, 1e4), max_size=4))


@given(
    waiting=st.lists(candidate, max_size=12), count=st.integers(0, 12), speeds=speeds_, held=st.floats(0, 1e4),
    version=st.integers(7, 10), ahead=st.integers(0, 5),
)  # fmt: skip
def test_all_that_is_handed_out_is_predicted_to_be_admissible(
    waiting: list[Candidate], count: int, speeds: Speeds, held: float, version: int, ahead: int
) -> None:
    waiting = [Candidate(i, c.tokens, c.partial_version, c.fresh_tokens) for i, c in enumerate(waiting)]
    found = choose(waiting, count=count, version=version, speeds=speeds, pace=PACE, held_tokens=held, ahead=ahead)
    assert len(found.ordinals) <= count
    assert len(set(found.ordinals)) == len(found.ordinals)
    load = held
    assert speeds.own is not None
    for ordinal in found.ordinals:
        c = waiting[ordinal]
        if ordinal in found.dropped:
            tokens, oldest = c.fresh_tokens or 0.0, version
        else:
            tokens, oldest = c.tokens or 0.0, version if c.partial_version is None else min(version, c.partial_version)
        load += tokens
        if load <= speeds.own * PACE.time_left(oldest) * MARGIN + 1e-6:
            continue
        # The one exception: the group that waits longest, alone, when no other node could or none is at work.
        assert found.ordinals == [0]
        assert held == 0
        assert ahead == 0 or all(tokens > s * PACE.time_left(oldest) * MARGIN for s in speeds.others)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.floats(1, 1000), min_size=60, max_size=60),
    asks=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=10, max_size=60),
)
def test_a_group_is_overtaken_at_most_by_those_of_the_window(
    lengths: list[float], asks: list[tuple[int, bool]]
) -> None:
    prompts, done, overtaken = 8, set[int](), dict[int, int]()
    widest = max(window(count, prompts) for count, _ in asks)
    for count, fast in asks:
        waiting = [i for i in range(60) if i not in done]
        if not waiting:
            break
        looked_at = [i for i in waiting if i < waiting[0] + window(count, prompts)]
        speeds = Speeds(1e6, [1.0]) if fast else Speeds(1e6, [1e9])
        found = choose(
            [Candidate(i, lengths[i]) for i in looked_at], count=count, version=10, speeds=speeds, pace=PACE
        ).ordinals
        assert len(found) == min(count, len(looked_at))
        done |= set(found)
        for i in waiting:
            if i not in done:
                overtaken[i] = overtaken.get(i, 0) + sum(1 for other in found if other > i)
    assert max(overtaken.values(), default=0) < widest


@pytest.mark.parametrize(
    ("mean", "tries", "job", "expected"),
    [
        (None, 0, None, None), (None, 0, 50.0, 50.0), (100.0, 0, 50.0, 50.0), (100.0, 8, None, 100.0),
        (100.0, 8, 50.0, 75.0), (100.0, 64, 10.0, 90.0), (100.0, 10_000, 10.0, 90.0),
    ],
)  # fmt: skip
def test_lengths_are_drawn_to_the_jobs_mean(
    mean: float | None, tries: int, job: float | None, expected: float | None
) -> None:
    assert predicted_length(mean, tries, job) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mean", "tries", "new", "count", "expected"),
    [
        (None, 0, 20.0, 8, 20.0), (10.0, 0, 20.0, 8, 20.0), (10.0, 8, 20.0, 8, 15.0), (10.0, 24, 20.0, 8, 12.5),
        (10.0, 64, 20.0, 64, 15.0), (10.0, 10_000, 20.0, 64, 15.0),  # no more than 64 of the old ones count
    ],
)  # fmt: skip
def test_a_running_mean_weighs_each_completion_alike_and_forgets_old_ones(
    mean: float | None, tries: int, new: float, count: int, expected: float
) -> None:
    assert dispatch.mean_after(mean, tries, new, count) == pytest.approx(expected)


def test_running_means_follow_a_policy_that_grows_longer() -> None:
    mean: float | None = None
    for tries in range(0, 800, 8):
        mean = dispatch.mean_after(mean, tries, 10.0 if tries < 400 else 20.0, 8)
    assert mean == pytest.approx(20.0, abs=0.1)


@pytest.mark.parametrize(
    ("count", "prompts", "widest"), [(0, 8, 0), (-1, 8, 0), (1, 8, 4), (4, 8, 4), (6, 8, 6), (1, 9, 4), (1, 1, 1)]
)
def test_half_a_batch_is_looked_at_or_what_is_asked_for(count: int, prompts: int, widest: int) -> None:
    assert window(count, prompts) == widest


@pytest.mark.parametrize(
    ("tokens", "rollouts", "mean", "speed"),
    [
        (500.0, 2.0, 100.0, 500.0),  # as it says
        (None, 2.0, 100.0, 200.0),
        (0.0, 2.0, 100.0, 200.0),
        (None, None, 100.0, None),
        (None, 2.0, None, None),
    ],
)
def test_the_speed_of_a_node_that_tells_no_tokens_is_that_of_its_rollouts(
    tokens: float | None, rollouts: float | None, mean: float | None, speed: float | None
) -> None:
    assert dispatch.node_speed(tokens_per_s=tokens, rollouts_per_s=rollouts, job_mean=mean) == speed


def test_a_beginning_that_only_this_node_can_finish_in_time_is_kept() -> None:
    begun = [Candidate(5, 7000, 7, 9500)]
    assert _given(begun, speeds=Speeds(1000.0, [10.0])).dropped == []
    assert _given(begun, speeds=Speeds(10.0, [1000.0])).dropped == [], "or only another one"
    assert _given(begun, speeds=Speeds(10.0, [10.0])).dropped == [5]
    assert _given(begun, speeds=Speeds(None)).dropped == [], "nobody knows how fast they are"


def test_a_node_as_fast_as_the_middle_one_is_fast() -> None:
    assert _given(_new(200, 100), speeds=Speeds(500.0, [500.0])).ordinals == [100, 101]
    assert _given(_new(200, 100), speeds=Speeds(500.0, [400.0, 600.0])).ordinals == [100, 101]
    assert _given(_new(200, 100), speeds=Speeds(500.0, [600.0, 600.0])).ordinals == [101, 100]


def test_who_gets_nothing_is_told_what_it_would_take() -> None:
    told = _given(_new(5000), version=9, speeds=Speeds(100.0, [10_000.0]), held_tokens=2900.0).reason
    assert "at 100 tokens/s with 2900 tokens" in told
    assert "in the 30 s in which v9 stays admissible" in told
    assert _given(_new(5000), count=0).reason == "", "who asks for nothing"
    late = _given(_new(100), version=5, speeds=Speeds(100.0, [10_000.0]), held_tokens=1.0).reason
    assert "in the 0 s in which v5" in late


def test_steps_take_what_the_slower_of_learner_and_pool_needs() -> None:
    assert dispatch.step_seconds(t_train=None, rollouts=64, mu_pool=1.0) is None
    assert dispatch.step_seconds(t_train=5.0, rollouts=64, mu_pool=0.0) == 5.0
    assert dispatch.step_seconds(t_train=5.0, rollouts=64, mu_pool=2.0) == 32.0
    assert dispatch.step_seconds(t_train=5.0, rollouts=64, mu_pool=0.5) == 128.0
    assert Pace(10, 3, None).time_left(6) == -math.inf
    assert Pace(10, 3, None).time_left(7) == math.inf
