"""Where the target goes once waiting and drops are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet.steering import (
    MOST,
    WINDOW_STEPS,
    Aim,
    Periods,
    Seen,
    batch_times,
    held_by,
    measured,
    periods,
    steer,
)

ROLLOUTS, GAMMA, T_TRAIN, KAPPA = 256, 1.1, 10.0, 2
KNEE = ROLLOUTS / T_TRAIN
FLOOR = GAMMA * KNEE
EQ2 = 1.7 * FLOOR


def history(
    first: int, count: int, *, pool: float, bubble: float = 0.0, dropped: float = 0.0, t_train: float = T_TRAIN
) -> list[Seen]:
    """Steps that all waited for a share of their time."""
    idle = t_train * bubble / (1 - bubble)
    return [Seen(first + n, t_train, idle, ROLLOUTS, round(ROLLOUTS * dropped), pool) for n in range(count)]


def look(
    before: Aim | None, steps: list[Seen], *, eq2: float = EQ2, bound: float = 0.05, t_bcast: float | None = None
) -> Aim:
    """`t_bcast` None: the owner fixed κ."""
    return steer(
        (before.factor, before.since_step, before.near) if before else (None, 0, False),
        eq2=eq2, rollouts=ROLLOUTS, gamma=GAMMA, t_train=T_TRAIN, kappa=KAPPA,
        allowed=periods(KAPPA, fixed=t_bcast is None, t_train=T_TRAIN, t_bcast=t_bcast), steps=steps, bound=bound,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("t_bcast", "bubble", "pool", "kappa"),
    [
        (4.0, 0.2, 1.1 * KNEE, 1),  # machines enough, a broadcast fits: a version more often
        (4.0, 0.2, 0.8 * KNEE, 2),  # machines are missing
        (4.0, 0.01, 1.1 * KNEE, 2),  # nobody waits
        (9.0, 0.2, 1.1 * KNEE, 2),  # one step would hold a broadcast, but hardly
        (6.6, 0.2, 1.1 * KNEE, 1),  # 1.5 times is enough
        (None, 0.2, 1.1 * KNEE, 2),
    ],
)
def test_who_waits_for_a_version_gets_it_sooner(t_bcast: float | None, bubble: float, pool: float, kappa: int) -> None:
    start = Aim(1.0, 10, FLOOR, KNEE, "")
    aim = look(start, history(11, 8, pool=pool, bubble=bubble), t_bcast=t_bcast)
    assert aim.kappa == kappa
    if kappa < KAPPA:
        assert aim.target == pytest.approx(FLOOR), "not more machines at the same time"
        assert aim.since_step == 18, "what comes of it is seen in the steps that follow"
        assert "κ 2 → 1" in aim.why


@pytest.mark.parametrize(("oldest", "kappa"), [(3, 1), (2, 1), (1, 2), (None, 1)])
def test_a_learner_with_young_rollouts_does_not_wait_for_a_version(oldest: int | None, kappa: int) -> None:
    """S = 3: each further version costs audits, so it has to be versions that are missing."""
    steps = [replace(s, oldest=oldest) for s in history(11, 8, pool=1.1 * KNEE, bubble=0.2)]
    aim = steer(
        (1.0, 10, False), eq2=EQ2, rollouts=ROLLOUTS, gamma=GAMMA, t_train=T_TRAIN, kappa=KAPPA, staleness=3,
        allowed=periods(KAPPA, fixed=False, t_train=T_TRAIN, t_bcast=4.0), steps=steps, bound=0.05,
    )  # fmt: skip
    assert aim.kappa == kappa
    assert (aim.target > FLOOR) == (kappa == KAPPA), "machines are tried then"


@pytest.mark.parametrize(("newest", "kappa"), [(2, 1), (1, 2)])
def test_one_old_rollout_in_the_window_is_enough_to_see_that_versions_are_missing(newest: int, kappa: int) -> None:
    steps = [replace(s, oldest=0) for s in history(11, 8, pool=1.1 * KNEE, bubble=0.2)]
    steps[3] = replace(steps[3], oldest=newest)
    aim = steer(
        (1.0, 10, False), eq2=EQ2, rollouts=ROLLOUTS, gamma=GAMMA, t_train=T_TRAIN, kappa=KAPPA, staleness=3,
        allowed=periods(KAPPA, fixed=False, t_train=T_TRAIN, t_bcast=4.0), steps=steps, bound=0.05,
    )  # fmt: skip
    assert aim.kappa == kappa


def test_of_equation_two_a_shorter_period_asks_for_no_more_machines() -> None:
    aim = look(None, history(2, 8, pool=EQ2, bubble=0.2), t_bcast=4.0)
    assert (aim.kappa, aim.factor) == (1, pytest.approx(EQ2 / FLOOR))


def test_a_period_that_does_not_hold_its_broadcast_any_more_grows() -> None:
    aim = steer(
        (1.0, 10, False), eq2=EQ2, rollouts=ROLLOUTS, gamma=GAMMA, t_train=T_TRAIN, kappa=1,
        allowed=periods(3, fixed=False, t_train=T_TRAIN, t_bcast=19.0), steps=history(11, 2, pool=EQ2), bound=0.05,
    )  # fmt: skip
    assert aim.kappa == 2
    assert aim.moved


@given(st.integers(1, 20), st.floats(0.01, 1e4), st.floats(0.0, 1e5))
def test_periods_stay_within_what_staleness_allows(longest: int, t_train: float, t_bcast: float) -> None:
    found = periods(longest, fixed=False, t_train=t_train, t_bcast=t_bcast)
    assert 1 <= found.least <= found.shortest <= found.longest == longest
    assert periods(longest, fixed=True, t_train=t_train, t_bcast=t_bcast) == Periods(longest, longest, longest)


def test_begins_with_equation_two() -> None:
    aim = look(None, [])
    assert aim.target == pytest.approx(EQ2)
    assert aim.knee == pytest.approx(KNEE)
    assert not aim.moved
    assert look(aim, [], eq2=1.2 * FLOOR).target == pytest.approx(1.2 * FLOOR), "T_bcast is a guess at first"


def test_a_broadcast_as_long_as_the_period_does_not_rent_the_whole_market() -> None:
    aim = look(None, [], eq2=1e6)
    assert aim.target == pytest.approx(2 * FLOOR)
    waiting = look(aim, history(1, 20, pool=3 * FLOOR, bubble=0.3), eq2=1e6)
    assert waiting.target == pytest.approx(MOST * FLOOR)
    assert "more machines would not help" in waiting.why


@pytest.mark.parametrize(
    ("bubble", "dropped", "pool", "direction"),
    [
        (0.00, 0.00, EQ2, -1),
        (0.02, 0.00, EQ2, -1),
        (0.04, 0.00, EQ2, 0),
        (0.04, 0.10, EQ2, -1),
        (0.20, 0.00, EQ2, +1),
        (0.20, 0.00, 0.96 * EQ2, +1),
        (0.20, 0.00, 0.50 * EQ2, 0),
        (0.20, 0.10, EQ2, +1),
    ],
)
def test_moves_by_what_is_measured(bubble: float, dropped: float, pool: float, direction: int) -> None:
    start = Aim(1.5, 10, 1.5 * FLOOR, KNEE, "")
    aim = look(start, history(11, 8, pool=pool, bubble=bubble, dropped=dropped))
    assert aim.factor is not None
    assert (aim.factor > 1.5) - (aim.factor < 1.5) == direction
    assert aim.moved == (direction != 0)
    assert aim.why


def test_waits_for_a_whole_window_and_counts_from_the_last_move() -> None:
    start = Aim(1.5, 10, 1.5 * FLOOR, KNEE, "")
    steps = history(1, 10, pool=EQ2, bubble=0.5) + history(11, WINDOW_STEPS - 1, pool=EQ2)
    assert not look(start, steps).moved, "what was before the move says nothing of what came of it"
    aim = look(start, [*steps, *history(10 + WINDOW_STEPS, 1, pool=EQ2)])
    assert aim.moved
    assert aim.since_step == 10 + WINDOW_STEPS


@pytest.mark.parametrize(("kappa", "steps"), [(1, 6), (3, 6), (4, 8), (10, 20)])
def test_a_window_has_six_steps_and_two_publish_periods(kappa: int, steps: int) -> None:
    for count in (steps - 1, steps):
        aim = steer(
            (1.5, 10, False), eq2=EQ2, rollouts=ROLLOUTS, gamma=GAMMA, t_train=T_TRAIN, kappa=kappa,
            allowed=Periods(kappa, kappa, kappa), steps=history(11, count, pool=EQ2), bound=0.05,
        )  # fmt: skip
        assert aim.moved == (count == steps)


def test_what_was_long_ago_says_nothing_of_now() -> None:
    start = Aim(1.5, 10, 1.5 * FLOOR, KNEE, "")
    waited, now = history(11, 60, pool=1.5 * FLOOR, bubble=0.6), history(71, 60, pool=1.5 * FLOOR)
    aim = look(start, waited + now)
    assert aim.factor is not None
    assert aim.factor < 1.5


@pytest.mark.parametrize(("factor", "bubble", "what"), [(1.0, 0.0, "as low as it may be"), (2.0, 0.3, "would not")])
def test_an_aim_that_has_come_to_its_end_is_no_news(factor: float, bubble: float, what: str) -> None:
    aim = look(Aim(factor, 10, factor * FLOOR, KNEE, ""), history(11, 8, pool=factor * FLOOR, bubble=bubble))
    assert (aim.factor, aim.since_step, aim.moved) == (factor, 10, False)
    assert what in aim.why


def test_far_above_the_knee_it_goes_down_by_halves_and_in_small_steps_once_the_learner_has_waited() -> None:
    aim = look(Aim(1.8, 10, 1.8 * FLOOR, KNEE, ""), history(11, 8, pool=1.8 * FLOOR))
    assert aim.factor == pytest.approx(1.4)
    waited = look(aim, history(19, 8, pool=aim.target, bubble=0.2))
    assert waited.factor is not None
    assert waited.factor > 1.4
    assert waited.near
    again = look(waited, history(27, 8, pool=waited.target))
    assert again.factor == pytest.approx(0.93 * waited.factor)
    assert look(again, history(35, 8, pool=again.target)).factor == pytest.approx(0.93 * 0.93 * waited.factor)


def test_the_wait_for_the_first_machines_is_no_bubble() -> None:
    first = [Seen(1, T_TRAIN, 600.0, ROLLOUTS, 0, EQ2)]
    aim = look(Aim(1.5, 0, 1.5 * FLOOR, KNEE, ""), first + history(2, 8, pool=EQ2))
    assert aim.target < 1.5 * FLOOR


def test_a_smaller_pool_that_is_enough_is_the_new_aim_at_once() -> None:
    aim = look(Aim(1.8, 10, 1.8 * FLOOR, KNEE, ""), history(11, 8, pool=1.2 * FLOOR))
    assert aim.target == pytest.approx(1.2 * FLOOR)


def test_a_learner_that_resumed_earlier_is_looked_at_from_where_it_stands() -> None:
    aim = look(Aim(1.5, 100, 1.5 * FLOOR, KNEE, ""), history(1, 20, pool=EQ2))
    assert aim.since_step == 20


def test_switched_off_it_is_equation_two_whatever_happens() -> None:
    aim = look(Aim(1.0, 0, FLOOR, KNEE, ""), history(1, 20, pool=EQ2, bubble=0.3), bound=0)
    assert aim.target == EQ2
    assert not aim.moved


@given(
    knee=st.floats(0.7, 1.6),
    stretch=st.floats(1.0, 20.0),
    noise=st.lists(st.floats(-0.01, 0.01), min_size=16, max_size=16),
)
@settings(max_examples=60)
def test_finds_the_true_knee_from_wherever_equation_two_begins(knee: float, stretch: float, noise: list[float]) -> None:
    """A learner that waits exactly when the pool delivers less than `knee` · R/T_train."""
    eq2 = stretch * FLOOR
    aim, step, bubbles = look(None, [], eq2=eq2), 0, []
    for n in range(40):
        pool = aim.target
        bubble = min(0.9, max(0.0, 1 - pool / (knee * KNEE) + noise[n % 16]))
        steps = history(step + 1, 10, pool=pool, bubble=bubble)
        step += 10
        aim = look(aim, steps, eq2=eq2)
        bubbles.append(bubble)
        assert FLOOR * (1 - 1e-9) <= aim.target <= MOST * FLOOR * (1 + 1e-9)
    assert aim.target <= 1.2 * max(FLOOR, knee * KNEE), "no more than a move above what is needed"
    assert sum(bubbles[-20:]) / 20 <= 0.06


def test_measured_is_weighted_by_time() -> None:
    steps = [Seen(1, 1.0, 0.0, 10, 0, 4.0), Seen(2, 1.0, 2.0, 10, 5, 8.0)]
    assert measured(steps) == pytest.approx((0.5, 0.2, 7.0))
    assert measured([]) == (0.0, 0.0, 0.0)


def test_a_step_that_took_more_than_its_batch_counts_by_the_batch_s_share() -> None:
    steps = [
        Seen(n, 2.0, 0.0, trained, 0, KNEE) for n, trained in enumerate((ROLLOUTS, 2 * ROLLOUTS, ROLLOUTS // 2, 0), 1)
    ]
    assert batch_times(steps, ROLLOUTS) == [2.0, 2.0, 1.0, 2.0], "newest first"
    assert batch_times([], ROLLOUTS) == []


@pytest.mark.parametrize(
    ("newest", "bubble", "expected"),
    [
        (5.0, 0.0, 10.0),  # faster for a while, and nobody waits: no machine for that
        (5.0, 0.04, 10.0),
        (5.0, 0.06, 5.0),  # they are missed
        (20.0, 0.0, 20.0),  # slower: less is needed at once
    ],
)
def test_steps_that_come_faster_need_no_machine_until_the_learner_waits(
    newest: float, bubble: float, expected: float
) -> None:
    steps = history(1, 54, pool=KNEE) + history(55, 6, pool=KNEE, t_train=newest, bubble=bubble)
    times = batch_times(steps, ROLLOUTS)
    assert held_by(times, steps, usual=newest, bound=0.05) == expected


def test_a_first_step_that_took_long_is_left_out_of_the_mean() -> None:
    steps = history(1, 1, pool=KNEE, t_train=100.0) + history(2, 19, pool=KNEE)
    assert held_by(batch_times(steps, ROLLOUTS), steps, usual=T_TRAIN, bound=0.05) == pytest.approx(T_TRAIN)
    assert held_by([], [], usual=3.0, bound=0.05) == 3.0
