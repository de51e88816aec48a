"""Adaptive staleness: down at once, up slowly, never beyond what the owner allowed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.learner.adaptive import GROW_EVERY, WINDOW, Adaptive, Limits, Signs, State, again, easy, look, trouble
from app.protocol.job import JobSpec
from app.protocol.learner import LearnerDirectives
from tests.unit.learner.samples import job

CALM = Signs(ess=0.98, mismatch_kl=0.001, reward=0.5, oldest=2)
BAD = {"ess": 0.3, "mismatch_kl": 0.2, "cosine": 0.99}
SIGNS = st.builds(
    Signs,
    ess=st.floats(0, 1),
    mismatch_kl=st.one_of(st.floats(0, 0.1), st.just(math.nan)),
    reward=st.floats(0, 1),
    oldest=st.integers(0, 30),
    cosine=st.one_of(st.none(), st.floats(-1, 1)),
)
CALM_OR_ANY = st.one_of(st.just(CALM), SIGNS)


def changed(**values) -> Signs:
    return Signs(**{**{f: getattr(CALM, f) for f in CALM.__slots__}, **values})


@given(
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 10)),
    st.lists(CALM_OR_ANY, max_size=80),
    st.lists(st.tuples(st.integers(0, 79), st.integers(1, 20)), max_size=3),
)
def test_s_stays_within_its_bounds_falls_at_once_and_rises_slowly(start, fixed, steps, patches):
    state, bound, quiet = State(start), start, 0
    for number, seen in enumerate(steps):
        bound = dict(patches).get(number, bound)
        before = state
        state, move = look(before, seen, bound=bound, period=fixed)
        assert 1 <= state.staleness <= bound
        quiet += 1
        if move is None:
            assert state.staleness == before.staleness
        else:
            assert move.staleness == state.staleness != before.staleness
            assert 1 <= move.publish_period <= max(1, move.staleness - 1)
            assert fixed is None or move.publish_period <= fixed
            assert move.reason
        if state.staleness > before.staleness:
            assert state.staleness == before.staleness + 1
            assert quiet >= GROW_EVERY
        if move is not None:
            quiet = 0
        if before.staleness <= bound and trouble(seen, (), Limits()):
            quiet = 0
            assert state.staleness == 1 or state.staleness < min(before.staleness, seen.oldest)


@pytest.mark.parametrize("name", list(BAD))
def test_each_sign_lowers_s_below_the_oldest_rollout_of_the_step(name):
    state, move = look(State(11), changed(**{name: BAD[name], "oldest": 5}), bound=11)
    assert state.staleness == 4
    assert (move.staleness, move.publish_period) == (4, 3)
    assert f"{BAD[name]:.2f}"[:3] in move.reason


def test_s_does_not_fall_below_one():
    state, move = look(State(1), changed(ess=0.1, oldest=9), bound=6)
    assert (state.staleness, move) == (1, None)


def test_calm_steps_raise_s_by_one_up_to_the_bound():
    state, moves = State(2), []
    for number in range(1, 100):
        state, move = look(state, CALM, bound=4)
        moves += [(number, move.staleness, move.publish_period)] if move else []
    assert moves == [(10, 3, 2), (20, 4, 3)]


def test_a_bad_step_that_can_not_lower_s_begins_the_calm_anew():
    state = State(1)
    for number in range(1, 30):
        state, move = look(state, changed(ess=0.1) if number == 7 else CALM, bound=4)
        if move:
            assert (number, move.staleness) == (17, 2)
            return
    pytest.fail("S never rose")


@pytest.mark.parametrize("sign", [{"ess": 0.7}, {"mismatch_kl": 0.016}, {"cosine": 0.5}])
def test_a_sign_near_its_limit_holds_s_where_it_is(sign):
    seen, state = changed(**sign), State(2)
    assert not trouble(seen, (), Limits())
    assert not easy(seen, Limits())
    for _ in range(5 * GROW_EVERY):
        state, move = look(state, seen, bound=6)
        assert move is None


def test_a_falling_reward_lowers_s_and_noise_does_not():
    rng = random.Random(1)
    state = State(6)
    for _ in range(8 * WINDOW):
        state, move = look(state, changed(reward=0.5 + rng.gauss(0, 0.02)), bound=6)
        assert move is None
    found = []
    for number in range(2 * WINDOW):
        state, move = look(state, changed(reward=0.5 - 0.02 * number + rng.gauss(0, 0.02), oldest=6), bound=6)
        found += [move] if move else []
    assert found[0].staleness == 5
    assert "reward fell" in found[0].reason


@pytest.mark.parametrize(("errors", "falls"), [(2.7, False), (3.3, True), (-3.3, False)])
def test_the_mean_of_ten_rewards_has_to_fall_by_more_than_three_standard_errors(errors: float, falls: bool):
    """Rewards of 0.5 ± 0.01 ten times, then of so much less; each mean has a variance of 0.01² / 9."""
    error = math.sqrt(2 * 0.01**2 / 9)
    rewards = [0.5 + 0.01 * (-1) ** i - (errors * error if i >= 10 else 0.0) for i in range(20)]
    state, moves = State(6), []
    for reward in rewards:
        # Too little calm for a rise: that would forget the rewards.
        state, move = look(state, changed(reward=reward, ess=0.7, oldest=6), bound=6)
        moves.append(move)
    assert moves[:19] == [None] * 19
    assert (moves[19] is not None) is falls


def test_a_lower_bound_holds_at_once():
    state, move = look(State(8, calm=3), CALM, bound=3)
    assert (state.staleness, move.staleness, move.publish_period) == (3, 3, 2)


def directives(staleness: int, bound: int | None) -> LearnerDirectives:
    return LearnerDirectives(command="run", staleness_budget=staleness, publish_period=1, staleness_bound=bound)


def test_the_controller_begins_with_the_s_that_holds_and_follows_the_owners_bound():
    adaptive = Adaptive(job(staleness={"max": 6, "adaptive": True}))
    bad = {"ess": 0.2, "mismatch_kl": 0.01, "reward": 0.5}
    first = adaptive.after(bad, {2: 8, 4: 8}, directives(5, 6))
    assert (first.staleness_budget, first.publish_period) == (3, 2)
    # The answer is still under way: what was asked for counts.
    second = adaptive.after(bad, {3: 8}, directives(5, 6))
    assert second.staleness_budget == 2
    calm = {"ess": 1.0, "mismatch_kl": 0.0, "reward": 0.5}
    moves = [adaptive.after(calm, {1: 8}, directives(2, 3)) for _ in range(5 * GROW_EVERY)]
    assert [m.staleness_budget for m in moves if m] == [3]


def test_a_bad_step_that_is_made_again_lowers_s_once():
    spec = job(staleness={"max": 6, "adaptive": True})
    bad = {"ess": 0.2, "mismatch_kl": 0.01, "reward": 0.5}
    first = Adaptive(spec)
    kept = first.state(directives(5, 6))
    asked = first.after(bad, {2: 8, 4: 8}, directives(5, 6))
    assert asked.staleness_budget == 3
    # It dies; the control service has taken the move, and takes it back for the learner that goes on from before it.
    assert again(spec, kept).staleness_budget == 5
    assert Adaptive(spec, kept).after(bad, {2: 8, 4: 8}, directives(3, 6)) == asked


def test_a_job_with_a_fixed_s_has_nothing_to_go_on_from():
    assert Adaptive(job()).state(directives(3, None)) is None
    assert again(job(), None) is None


def test_limits_are_the_jobs():
    adaptive = Adaptive(job(staleness={"max": 6, "adaptive": True, "min_ess": 0.9}))
    move = adaptive.after({"ess": 0.8, "mismatch_kl": 0.0, "reward": 0.5}, {6: 8}, directives(6, 6))
    assert move.staleness_budget == 5


@pytest.mark.parametrize("spec", [{}, {"staleness": {"max": 6}}, {"staleness": {"max": 6, "adaptive": False}}])
def test_a_fixed_s_stays(spec):
    adaptive = Adaptive(job(**spec))
    assert adaptive.after({"ess": 0.0, "mismatch_kl": 9.0, "reward": 0.0}, {6: 8}, directives(6, None)) is None


def test_staleness_is_another_way_to_give_the_budget():
    spec = job(staleness={"max": 6, "adaptive": True})
    assert (spec.staleness_budget, spec.first_staleness, spec.first_period, spec.adaptive) == (6, 3, 2, True)
    assert job(staleness={"max": 2, "adaptive": True}).first_staleness == 2
    assert job(staleness={"max": 6}).first_staleness == 6
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert job(staleness={"max": 6}, staleness_budget=6).staleness_budget == 6
    assert job().staleness is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"staleness": {"max": 6}, "staleness_budget": 3}, "give one of them"),
        ({"staleness": {"max": 6}, "publish_period": 6}, "at most max"),
        ({"staleness": {"max": 0}}, "greater than or equal to 1"),
        ({"staleness": {"adaptive": True}}, "max"),
        ({"staleness": {"max": 3, "min": 1}}, "min"),
    ],
)
def test_a_wrong_staleness_is_refused_with_what_to_change(wrong, said):
    with pytest.raises(ValueError, match=said):
        job(**wrong)
