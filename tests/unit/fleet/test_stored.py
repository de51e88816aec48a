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
