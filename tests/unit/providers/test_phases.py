"""What each of vast.ai's states means to us."""

from __future__ import annotations

from typing import Any

import pytest

from providers.base import Phase
from providers.vastai.phases import detail_of, phase_of

RUNS = {"cur_state": "running", "next_state": "running", "intended_status": "running"}
STOPPED = {"cur_state": "stopped", "next_state": "stopped", "intended_status": "stopped"}
STARTS = {"cur_state": "stopped", "next_state": "running", "intended_status": "running"}


@pytest.mark.parametrize(
    ("row", "phase"),
    [
        ({"actual_status": None, **STARTS}, Phase.PENDING),
        ({"actual_status": "created", **STARTS}, Phase.LOADING),
        ({"actual_status": "loading", **STARTS}, Phase.LOADING),
        ({"actual_status": "rebooting", **RUNS}, Phase.LOADING),
        ({"actual_status": "running", **RUNS}, Phase.RUNNING),
        ({"actual_status": "running", "status_msg": "success, running img", **RUNS}, Phase.RUNNING),
        ({"actual_status": "frozen", **RUNS}, Phase.RUNNING),
        ({"actual_status": "stopped", **STOPPED}, Phase.PAUSED),
        ({"actual_status": "exited", **RUNS}, Phase.FAILED),
        ({"actual_status": "unknown", **RUNS}, Phase.UNKNOWN),
        ({"actual_status": "offline", **RUNS}, Phase.UNKNOWN),
        ({"actual_status": "hibernating", **RUNS}, Phase.UNKNOWN),
        ({"actual_status": 7, **RUNS}, Phase.UNKNOWN),
        # Outbid while loading is no slow start, and outbid after running no crash.
        ({"actual_status": "loading", "is_bid": True, **STOPPED}, Phase.PAUSED),
        ({"actual_status": None, "is_bid": True, **STOPPED}, Phase.PAUSED),
        ({"actual_status": "exited", "is_bid": True, **STOPPED}, Phase.PAUSED),
        # These wait for ever otherwise.
        ({"actual_status": "created", "status_msg": "OCI runtime create failed: x", **STARTS}, Phase.FAILED),
        ({"actual_status": "created", "status_msg": "unsatisfied condition: cuda>=12.8", **STARTS}, Phase.FAILED),
        ({"actual_status": "loading", "status_msg": "Error response from daemon: x", **STARTS}, Phase.FAILED),
    ],
)
def test_phase(row: dict[str, Any], phase: Phase) -> None:
    assert phase_of(row) is phase


def test_outbid_is_said() -> None:
    assert detail_of({"is_bid": True, "status_msg": None, **STOPPED}) == "outbid"
    assert detail_of({"is_bid": True, "status_msg": "stopped", **STOPPED}) == "outbid: stopped"
    assert detail_of({"is_bid": False, "status_msg": "stopped", **STOPPED}) == "stopped"
