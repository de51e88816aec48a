"""Lists by `limit` and `cursor`. Invariant: a cursor is opaque and names the last row that was seen."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import Query

from app.protocol.errors import BadInput, FieldError

Limit = Annotated[int, Query(ge=1, le=1000)]
MOST_DIGITS = 18
Cursor = Annotated[str | None, Query(max_length=100)]


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
