"""What vast.ai's words for an instance's state mean to us.

Invariant: pure; an unheard word is UNKNOWN, never "still starting".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from providers.base import Phase

_NEVER = ("oci runtime create failed", "unsatisfied condition", "error response from daemon")

BY_STATUS: Mapping[str | None, Phase] = {
    None: Phase.PENDING,
    "": Phase.PENDING,
    "created": Phase.LOADING,
    "loading": Phase.LOADING,
    "rebooting": Phase.LOADING,
    "running": Phase.RUNNING,
    # Frozen keeps, and bills, the GPU.
    "frozen": Phase.RUNNING,
    "stopped": Phase.PAUSED,
    "exited": Phase.FAILED,
    # The host may come back: the caller waits with a deadline.
    "unknown": Phase.UNKNOWN,
    "offline": Phase.UNKNOWN,
}


def is_stopped(row: Mapping[str, Any]) -> bool:
    """Stopped for good or outbid: present, next and intended state all say so, whatever the container's status is."""
    return all(row.get(name) == "stopped" for name in ("cur_state", "next_state", "intended_status"))


def never_starts(row: Mapping[str, Any]) -> bool:
    """The container can't be made on this machine; waiting is useless."""
    message = str(row.get("status_msg") or "").lower()
    return row.get("actual_status") in ("created", "loading", None) and any(word in message for word in _NEVER)


def phase_of(row: Mapping[str, Any]) -> Phase:
    """Phase of one instance as vast.ai shows it."""
    if never_starts(row):
        return Phase.FAILED
    if is_stopped(row):
        return Phase.PAUSED
    status = row.get("actual_status")
    if status is not None and not isinstance(status, str):
        return Phase.UNKNOWN
    return BY_STATUS.get(status, Phase.UNKNOWN)


def detail_of(row: Mapping[str, Any]) -> str:
    """A sentence for people."""
    message = str(row.get("status_msg") or "").strip()
    if is_stopped(row) and row.get("is_bid"):
        return f"outbid: {message}" if message and not message.startswith("outbid") else message or "outbid"
    return message
