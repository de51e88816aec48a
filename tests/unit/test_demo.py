"""What the demo promises: each promise that is broken is named, and only that."""

from __future__ import annotations

from typing import Any

import pytest

from app.demo import job_spec
from app.demo.report import verdict
from app.protocol.job import JobSpec

KEPT: dict[str, Any] = {
    "status": "succeeded", "eval_initial": 0.27, "eval_final": 0.61, "budget_usd": "2.000000",
    "spent_usd": "0.030000", "marketplace_bill_usd": "0.030100", "leases_open": 0, "machines_running": 0,
    "nodes_peak": 4, "spent_own_count_usd": "0.030050",
}  # fmt: skip


def test_a_run_that_kept_everything_passes() -> None:
    assert verdict(KEPT) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "failed"}, "not succeeded"),
        ({"eval_final": 0.41}, "less than 0.15"),
        ({"eval_final": None}, "less than 0.15"),
        (
            {"spent_usd": "2.000001", "spent_own_count_usd": "2.000001", "marketplace_bill_usd": "2.000001"},
            "spent $2.000001",
        ),
        ({"spent_usd": "0.030500"}, "our ledger says $0.030500"),
        ({"spent_own_count_usd": "0.029000"}, "before the bill corrected it"),
        ({"leases_open": 1}, "leases are open"),
        ({"machines_running": 2}, "machines are running"),
        ({"nodes_peak": 2}, "fewer than 3"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, Any], words: str) -> None:
    (fault,) = verdict({**KEPT, **change})
    assert words in fault


def test_its_job_is_a_valid_one() -> None:
    spec = JobSpec.model_validate(job_spec(150))
    assert spec.kappa == 5
    assert spec.rollouts_per_step == 256


def test_without_a_bill_nothing_agrees() -> None:
    zero = {"spent_usd": "0.000000", "spent_own_count_usd": "0.000000", "marketplace_bill_usd": "0.000000"}
    assert len(verdict({**KEPT, **zero})) == 2
