"""Which stored snapshots may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.stored import KEEP, removable


@pytest.mark.parametrize(
    ("stored", "in_use", "gone"),
    [
        ([], [], []),
        ([0, 2, 4], [], []),
        ([0, 2, 4, 6, 8], [8, 8], [0, 2]),
        ([0, 2, 4, 6, 8], [8, 2], [0]),
        ([0, 2, 4, 6, 8], [None, 8], [0, 2]),
        ([8, 0, 6, 2, 4], [0], []),
    ],
)
def test_what_goes(stored: list[int], in_use: list[int | None], gone: list[int]) -> None:
    assert removable(stored, in_use) == gone


@given(st.sets(st.integers(0, 60)), st.lists(st.one_of(st.none(), st.integers(0, 60))))
def test_what_a_node_has_and_the_newest_stay(stored: set[int], in_use: list[int | None]) -> None:
    gone = set(removable(sorted(stored), in_use))
    assert not gone & {v for v in in_use if v is not None}
    assert not gone & set(sorted(stored)[-KEEP:])
    assert all(kept >= max(gone) for kept in stored - gone) if gone else True


@given(
    st.lists(st.booleans(), max_size=40),
    st.lists(st.one_of(st.none(), st.integers(0, 40)), max_size=5),
)
def test_with_deltas_all_that_is_kept_can_be_reached(wholes: list[bool], in_use: list[int | None]) -> None:
    """Version 0 is whole, each other one whole or a delta from the one before."""
    stored = list(range(len(wholes)))
    whole = [v for v in stored if v == 0 or wholes[v]]
    gone = set(removable(stored, in_use, whole))
    kept = [v for v in stored if v not in gone]
    assert not kept or kept[0] in whole, "the oldest that is kept needs nothing"
    assert kept == list(range(kept[0], len(stored))) if kept else not stored, "and the chain from it has no gap"
    assert not gone & {v for v in in_use if v is not None}
    assert not gone & set(stored[-KEEP:])
