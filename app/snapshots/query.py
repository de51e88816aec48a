"""What a request to a relay says, within bounds. Pure.

Invariant: whatever is out of bounds raises BadInput with the bounds in its text.
"""

from __future__ import annotations

import math

from app.protocol.errors import BadInput
from app.snapshots.headers import BASES, MAX_BASES
from app.snapshots.manifest import MAX_VERSION

MAX_WAIT_S = 30.0


def whole(text: str, name: str, low: int) -> int:
    """A whole number from `low` to MAX_VERSION."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 10 and low <= int(text) <= MAX_VERSION:
        return int(text)
    raise BadInput(f"{name} must be a whole number {low}…{MAX_VERSION}")


def seconds(text: str) -> float:
    """How long an announcement may be waited for."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_WAIT_S:
        raise BadInput(f"wait_s must be a number 0…{MAX_WAIT_S:.0f}")
    return value


def bases(text: str) -> list[int]:
    """The versions in the header of one who asks."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if len(parts) > MAX_BASES:
        raise BadInput(f"{BASES} names {len(parts)} versions, at most {MAX_BASES} may be")
    return [whole(part, BASES, 0) for part in parts]


def leaf_count(text: str | None) -> int | None:
    """How many leaves are asked for; None: all."""
    return None if text is None else whole(text, "leaves", 1)
