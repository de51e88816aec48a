"""Money: micro-dollars inside, six places outside."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.protocol.base import Printable, Strict, micros, moment, rfc3339, usd


@given(st.integers(-(10**18), 10**18))
def test_round_trip(amount: int) -> None:
    text = usd(amount)
    assert micros(text) == amount
    assert len(text.split(".")[1]) == 6


@pytest.mark.parametrize(
    ("amount", "text"),
    [(1_234_567, "1.234567"), (0, "0.000000"), (1, "0.000001"), (-1, "-0.000001"), (-1_500_000, "-1.500000"),
     (10**12, "1000000.000000")],
)  # fmt: skip
def test_usd(amount: int, text: str) -> None:
    assert usd(amount) == text


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        ("5", 5_000_000),
        (5, 5_000_000),
        (0.1, 100_000),
        ("0.0000005", 1),
        ("0.00000049", 0),
        (Decimal("1.0000015"), 1_000_002),
        ("1e3", 10**9),
        (" 2.5 ", 2_500_000),
    ],
)
def test_micros(value: str | int | float | Decimal, amount: int) -> None:
    assert micros(value) == amount


@pytest.mark.parametrize(
    "value",
    ["", "abc", "1,5", "$5", "nan", "sNaN", "inf", "-Infinity", float("nan"), float("inf"), "1e400", "1e999999"],
)
def test_what_is_no_amount_is_a_value_error(value: str | float) -> None:
    with pytest.raises(ValueError, match="dollars"):
        micros(value)


def test_times_are_utc_with_a_z() -> None:
    moment = datetime(2026, 12, 1, 12, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=2)))
    assert rfc3339(moment) == "2026-12-01T10:00:00.250Z"
    assert datetime.fromisoformat(rfc3339(moment)) == moment.astimezone(UTC)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (None, None),
        (0.0, "1970-01-01T00:00:00.000Z"),
        (1_796_119_200.25, "2026-12-01T10:00:00.250Z"),
        (-0.5, "1969-12-31T23:59:59.500Z"),
        (1e300, None),
        (float("inf"), None),
        (float("nan"), None),
    ],
)
def test_seconds_become_a_time_if_a_calendar_has_it(at: float | None, text: str | None) -> None:
    assert moment(at) == text


@pytest.mark.parametrize(("value", "amount"), [("9999999999999", 9_999_999_999_999_000_000), ("-1e12", -(10**18))])
def test_large_amounts_are_exact(value: str, amount: int) -> None:
    assert micros(value) == amount


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="more dollars than there are"):
        micros("10000000000000")


class Line(Strict):
    text: Printable


@pytest.mark.parametrize("text", ["two\nlines", "\x00", "\x1b[31m", "a\u2028b"])
def test_what_goes_into_logs_is_one_printable_line(text: str) -> None:
    assert Line(text="größer, 大").text == "größer, 大"
    with pytest.raises(ValidationError, match="can't be shown"):
        Line(text=text)


def test_a_message_doesnt_change_and_has_no_unknown_field() -> None:
    with pytest.raises(ValidationError, match="extra"):
        Line.model_validate({"text": "a", "more": 1})
    with pytest.raises(ValidationError, match="frozen"):
        Line(text="a").text = "b"  # type: ignore[misc]
