"""Groups without a signal are made up for from what is to spare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.learner.buffer import ReplayBuffer
from app.learner.refill import Spare, extra
from app.protocol.learner_spec import LearnerSpec
from tests.unit.learner.samples import group

SIGNAL, SILENT = (0.0, 1.0), (1.0, 1.0)


@pytest.mark.parametrize(
    ("batch", "rest", "prompts", "most", "want"),
    [
        ([1, 1, 1, 1], [(1, 0)] * 9, 4, 8, 0),  # all have a signal
        ([1, 1, 0, 0], [(1, 1)] * 6, 4, 8, 2),  # two to spare beyond the next step's four
        ([1, 1, 0, 0], [(1, 1)] * 5, 4, 8, 1),  # one
        ([1, 1, 0, 0], [(1, 1)] * 4, 4, 8, 0),  # the next step needs them
        ([1, 1, 0, 0], [(1, 0)] * 4, 4, 8, 2),  # the next step may not use them
        ([1, 1, 0, 0], [(1, 0), (1, 1)], 4, 8, 1),
        ([1, 0, 0, 0], [(0, 0)] * 9, 4, 8, 4),  # silent ones, up to the most
        ([1, 0, 0, 0], [(0, 0), (1, 0), (0, 0), (1, 0), (1, 0), (1, 0)], 4, 12, 5),
        ([1, 0, 0, 0], [], 4, 8, 0),
        ([0, 0, 0, 0], [(1, 0)] * 9, 4, 4, 0),  # no refill wanted
    ],
)
def test_how_many_more(batch, rest, prompts, most, want):
    spares = [Spare(bool(signal), bool(lasts)) for signal, lasts in rest]
    assert extra([bool(b) for b in batch], spares, prompts=prompts, most=most) == want


@given(
    st.lists(st.booleans(), max_size=8),
    st.lists(st.booleans(), max_size=20),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_a_refill_is_bounded_and_leaves_the_next_step_its_batch(batch, signals, stale, most):
    prompts = len(batch)
    rest = [Spare(s, i >= stale) for i, s in enumerate(signals)]
    count = extra(batch, rest, prompts=prompts, most=most)
    assert 0 <= count <= len(rest)
    assert count == 0 or prompts + count <= most
    left = rest[count:]
    assert count == 0 or sum(s.lasts for s in left) >= min(prompts, sum(s.lasts for s in rest))
    assert count == 0 or sum(batch) + sum(s.signal for s in rest[:count]) <= prompts


def filled(*kinds: tuple[str, tuple[float, ...], int]) -> ReplayBuffer:
    buffer = ReplayBuffer()
    for name, rewards, version in kinds:
        buffer.add(group(name, rewards=rewards, version=version))
    return buffer


def names(groups) -> list[str]:
    return [g.work_item for g in groups]


def test_take_fills_up_with_the_oldest_that_the_next_step_can_spare():
    buffer = filled(
        ("a", SIGNAL, 3), ("b", SILENT, 3), ("c", SILENT, 4), ("d", SIGNAL, 4), ("e", SIGNAL, 5), ("f", SIGNAL, 5)
    )
    taken, dropped = buffer.take(5, 3, 2, most=4)
    # Two are left for the next step; of the other two c has no signal.
    assert names(taken) == ["a", "b", "c", "d"]
    assert dropped == []
    assert names(buffer.take(6, 3, 2, most=4)[0]) == ["e", "f"]


def test_a_batch_that_has_its_signal_takes_nothing_more_however_much_is_there():
    buffer = filled(*((f"g{i}", SIGNAL, 3) for i in range(6)))
    assert names(buffer.take(5, 3, 2, most=4)[0]) == ["g0", "g1"]


def test_what_would_be_stale_at_the_next_step_is_not_kept_for_it():
    buffer = filled(("a", SILENT, 2), ("b", SIGNAL, 2), ("c", SIGNAL, 2))
    assert names(buffer.take(5, 3, 2, most=4)[0]) == ["a", "b", "c"]


def test_what_the_next_step_is_the_last_to_use_is_left_for_it():
    buffer = filled(("a", SILENT, 2), ("b", SIGNAL, 3), ("c", SIGNAL, 3))
    assert names(buffer.take(5, 3, 2, most=4)[0]) == ["a", "b"]
    assert names(buffer.take(6, 3, 1, most=4)[0]) == ["c"]


def test_without_a_refill_nothing_but_the_batch_is_taken():
    kinds = [(f"g{i}", SILENT, 0) for i in range(9)]
    assert names(filled(*kinds).take(0, 3, 2)[0]) == ["g0", "g1"]
    assert LearnerSpec(refill=False).most_groups(32) == 32
    assert LearnerSpec().most_groups(32) == 64
    assert LearnerSpec(refill_factor=1.5).most_groups(3) == 4


def test_a_step_never_waits_for_a_refill():
    buffer = filled(("a", SILENT, 0), ("b", SILENT, 0))
    assert buffer.ready(0, 3, 2)
    assert names(buffer.take(0, 3, 2, most=20)[0]) == ["a", "b"]
