"""What RunPod's words for a pod's state mean to us.

Invariant: pure; an unheard word is UNKNOWN, never "still starting".
"""

from __future__ import annotations

from collections.abc import Mapping

from providers.base import Phase

GONE = "TERMINATED"
"""RunPod's word for "deleted for good": such a pod is no instance any more."""

BY_STATUS: Mapping[str, Phase] = {
    "PROVISIONING": Phase.PENDING,
    "STARTING": Phase.LOADING,
    "RUNNING": Phase.RUNNING,
    # Stopped: by its user, by RunPod when the credit is used up. Its GPU is gone; a disk may be billed.
    "EXITED": Phase.PAUSED,
    "ERROR": Phase.FAILED,
    GONE: Phase.TERMINATING,
}


def phase_of(status: object) -> Phase:
    """Phase of a pod by its `status`."""
    return BY_STATUS.get(status, Phase.UNKNOWN) if isinstance(status, str) else Phase.UNKNOWN
