"""Common ground of all messages: strict models, money as text, time.

Invariant: money is an integer of micro-dollars inside and a decimal string with six places in JSON; a message with a
field that we don't know is an error.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

MICROS_PER_USD = 1_000_000
MAX_DIGITS = 12
"""Amounts of more digits before the point than this plus one are a mistake, and not worth the memory."""


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must hold no line break and no other character that can't be shown")
    return value


Printable = Annotated[str, AfterValidator(_printable)]
"""One line of text: it goes into logs and tables, and PostgreSQL keeps no zero byte."""


class Strict(BaseModel):
    """A message: unknown fields are refused, instances don't change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spec(Strict):
    """A part of what users write: no number in it is infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


class Lenient(BaseModel):
    """An answer that later versions may extend: unknown fields are ignored by older readers."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def usd(micros: int) -> str:
    """Micro-dollars as a decimal string with six places: 1234567 → "1.234567"."""
    sign, value = ("-", -micros) if micros < 0 else ("", micros)
    return f"{sign}{value // MICROS_PER_USD}.{value % MICROS_PER_USD:06d}"


def micros(value: str | int | float | Decimal) -> int:
    """Dollars as micro-dollars, rounded half up. Raises ValueError on anything that is not a finite amount."""
    try:
        amount = Decimal(str(value))
    except InvalidOperation as error:
        raise ValueError(f"{value!r} is not an amount of dollars") from error
    if not amount.is_finite():
        raise ValueError(f"{value!r} is not a finite amount of dollars")
    if amount and amount.adjusted() > MAX_DIGITS:
        raise ValueError(f"{str(value)[:40]!r} is more dollars than there are")
    return int((amount * MICROS_PER_USD).to_integral_value(rounding=ROUND_HALF_UP))


def utcnow() -> datetime:
    """Now, timezone-aware, UTC."""
    return datetime.now(UTC)


def rfc3339(moment: datetime) -> str:
    """A moment as RFC 3339 in UTC with a Z."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(at: float | None) -> str | None:
    """Seconds since the epoch as RFC 3339; None stays None, and so does a moment beyond all calendars."""
    try:
        return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    except (ValueError, OverflowError, OSError):
        return None
