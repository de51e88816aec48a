"""Matching a bill's lines with leases, and which differences are worth telling."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pytest

from app.fleet.bills import Billed, apart, matched, news
from app.storage.models import Lease
from providers.base import Charge


def line(instance: str, label: str, micros: int, end: float, kind: Literal["gpu", "disk"] = "gpu") -> Charge:
    return Charge("p", instance, label, kind, micros, datetime.fromtimestamp(0, UTC), datetime.fromtimestamp(end, UTC))


def test_lines_go_to_the_lease_that_they_name_and_to_no_other() -> None:
    leases = [Lease(id="a", label="echo2:f:a:1", instance_id="1"), Lease(id="b", label="echo2:f:b:1", instance_id=None)]
    charges = [
        line("1", "echo2:f:a:1", 10, 5),
        line("1", "", 1, 9, "disk"),
        line("2", "echo2:f:b:1", 100, 7),
        line("1", "somebody else's, with an id that came again", 1000, 99),
        line("3", "", 10_000, 99),
        line("", "", 10_000, 99),
    ]
    assert matched(charges, leases) == {
        "a": Billed(11, 9.0, {"gpu": 10, "disk": 1}),
        "b": Billed(100, 7.0, {"gpu": 100}),
    }


@pytest.mark.parametrize(
    ("bill", "ledger", "told"),
    [
        (1_000_000, 1_010_000, False),  # 1 %
        (1_000_000, 1_010_001, True),
        (10_000_000, 10_050_000, False),  # 5 cents
        (10_000_000, 10_050_001, True),
        (10_000_000, 9_949_999, True),
        (500, 1_500, False),  # a tenth of a cent
        (0, 1_001, True),
        (0, 0, False),
    ],
)
def test_apart(bill: int, ledger: int, told: bool) -> None:
    assert apart(bill, ledger) is told


def test_a_difference_is_told_once_per_size() -> None:
    assert news(2_000_000, 1_000_000, None)
    assert not news(2_000_000, 1_000_000, 1_000_000)
    assert not news(2_005_000, 1_000_000, 1_000_000)
    assert news(2_200_000, 1_000_000, 1_000_000)
    assert news(1_000_000, 1_000_000, 1_000_000)
    assert not news(1_000_000, 1_000_000, None)
