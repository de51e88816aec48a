"""When a gradient that repeats the one before is bent, and when its step is skipped."""

from __future__ import annotations

import pytest

from app.learner.alignment import removed, skipped


@pytest.mark.parametrize(
    ("cosine", "share"),
    [(-1.0, 0.0), (0.0, 0.0), (0.29, 0.0), (0.3, 0.0), (0.6, 0.5), (0.9, 2 / 3), (1.0, 0.7)],
)
def test_up_to_the_first_threshold_nothing_goes_and_beyond_it_what_is_over_it(cosine: float, share: float):
    assert removed(cosine, 0.3) == pytest.approx(share)


@pytest.mark.parametrize(
    ("cosine", "again", "expected"),
    [(0.95, False, True), (0.95, True, False), (0.85, False, False), (0.85, True, False)],
)
def test_beyond_the_second_threshold_a_step_is_skipped_unless_the_one_before_was(
    cosine: float, again: bool, expected: bool
):
    assert skipped(cosine, 0.9, again) is expected
