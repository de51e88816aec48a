"""pass@k and when the fleet evaluates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.scores import due, goes_first, pass_at, score


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    answers = [True] * right + [False] * (n - right)
    draws = list(itertools.combinations(answers, k))
    assert pass_at(n, right, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_of_nonsense_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        pass_at(n, right, k)


def test_scores_of_an_exam() -> None:
    found = score([[1.0, 0.0], [0.5, 0.0], [1.0, 1.0]], [1.0, 0.0, 1.0])
    assert found.reward == pytest.approx(3.5 / 6)
    assert found.pass_at_1 == pytest.approx((0.5 + 0 + 1) / 3), "half a reward is no right answer"
    assert found.pass_at_k == pytest.approx(2 / 3)
    assert (found.k, found.prompts) == (2, 3)
    assert found.greedy == pytest.approx(2 / 3)
    assert score([[0.0]], []).greedy is None


@pytest.mark.parametrize(
    ("version", "every", "last", "expected"),
    [
        (0, 20, 0, False),
        (18, 20, 0, False),
        (20, 20, 0, True),
        (22, 20, 20, False),
        (22, 20, 18, True),
        (41, 20, 22, True),
    ],
)
def test_the_first_version_at_or_after_each_multiple_is_evaluated(
    version: int, every: int, last: int, expected: bool
) -> None:
    assert due(version, every, last) is expected


@pytest.mark.parametrize(
    ("waited", "ready", "answers", "rollouts", "first"),
    [
        (19.0, 64, 0, 500, False),  # what is idle is theirs, and no more yet
        (21.0, 32, 900, 0, True),  # the learner has a batch
        (21.0, 31, 0, 0, True),
        (21.0, 31, 100, 300, True),  # of what is under way they are a quarter
        (21.0, 31, 101, 300, False),
        (2100.0, 0, 1, 0, False),
    ],
)
def test_held_out_prompts_go_first_when_their_version_is_nearly_gone_but_the_learner_does_not_wait_for_them(
    waited: float, ready: int, answers: int, rollouts: int, first: bool
) -> None:
    assert goes_first(waited, 10.0, ready=ready, prompts=32, answers=answers, rollouts=rollouts) is first
