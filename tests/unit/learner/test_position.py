"""Which versions' results are awaited, and which one is the best."""

from __future__ import annotations

import pytest

from app.learner.position import Position


@pytest.mark.parametrize(
    ("candidates", "best", "step", "reward", "best_after", "left"),
    [
        ((2, 4), None, 2, 0.5, (2, 0.5), (4,)),
        ((2, 4), (0, 0.4), 2, 0.5, (2, 0.5), (4,)),
        ((2, 4), (0, 0.5), 2, 0.5, (0, 0.5), (4,)),  # of equal ones the first
        ((2, 4), (0, 0.6), 2, 0.5, (0, 0.6), (4,)),
        ((2, 4), None, 4, 0.5, (4, 0.5), ()),  # an older one will have no result any more
        ((4,), None, 2, 0.9, None, (4,)),  # its checkpoint is gone
        ((), None, 2, 0.9, None, ()),
    ],
)
def test_a_result_counts_for_a_version_whose_checkpoint_is_kept(candidates, best, step, reward, best_after, left):
    position = Position(candidates=candidates, best=best)
    position.heard(step, reward)
    assert (position.best, position.candidates) == (best_after, left)


def test_a_candidate_takes_the_place_of_one_that_is_never_published_and_the_newest_three_stay():
    position = Position(candidates=(2, 4))
    position.enter(6, replaced=4)
    assert (position.candidates, position.evaluated) == ((2, 6), 6)
    position.enter(8, replaced=None)
    assert position.candidates == (2, 6, 8)
    position.enter(10, replaced=None)
    assert (position.candidates, position.evaluated) == ((6, 8, 10), 10)
