"""Cursors: what was handed out leads on, and nothing else does."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import BadInput
from app.protocol.paging import decode, encode


@given(st.integers(0, 10**18 - 1))
def test_a_cursor_comes_back_as_the_row_that_it_was_made_of(row: int) -> None:
    cursor = encode(row)
    assert decode(cursor) == row
    assert cursor.isascii()
    assert set(cursor).isdisjoint("=+/&?#")


def test_the_beginning_has_none() -> None:
    assert decode(None) is None


@pytest.mark.parametrize("text", ["", "v1", "v1:", "v1:x", "v2:1", "1", "v1:" + "9" * 19, "v1:1:2"])
def test_what_is_no_cursor_is_refused_with_what_to_change(text: str) -> None:
    for cursor in (base64.urlsafe_b64encode(text.encode()).decode().rstrip("="), "é", "a", "%"):
        with pytest.raises(BadInput) as caught:
            decode(cursor)
        assert [e.pointer for e in caught.value.errors] == ["/cursor"]
        assert "next_cursor" in caught.value.errors[0].detail
