"""Money: micro-dollars inside, six places outside."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.base import micros, rfc3339, usd


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
