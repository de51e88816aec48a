"""Cursors: where in a list the next page begins.

Invariant: a cursor names the last row that was seen; to whoever was given one it is opaque.
"""

from __future__ import annotations

import base64
import binascii

from app.protocol.errors import BadInput, FieldError

MOST_DIGITS = 18


def encode(position: int) -> str:
    """A cursor after the row with this number."""
    return base64.urlsafe_b64encode(f"v1:{position}".encode()).decode().rstrip("=")


def decode(cursor: str | None) -> int | None:
    """The row number behind a cursor; None at the beginning. Raises BadInput."""
    if cursor is None:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        version, _, position = text.partition(":")
        # No row has a number that a database can't hold.
        if version == "v1" and len(position) <= MOST_DIGITS:
            return int(position)
    except (binascii.Error, UnicodeDecodeError, ValueError):
        pass
    detail = "use the next_cursor of an earlier answer, unchanged"
    raise BadInput("this cursor can't be read", errors=[FieldError("/cursor", detail)])
