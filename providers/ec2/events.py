"""EC2's interruption events as EventBridge puts them into a queue.

Invariant: pure; a message that is not such an event is None, and is told apart from one that can't be read.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Literal

from providers.base import Notice

WARNING_S = 120.0
_KINDS: dict[str, Literal["interruption", "rebalance"]] = {
    "EC2 Spot Instance Interruption Warning": "interruption",
    "EC2 Instance Rebalance Recommendation": "rebalance",
}


def parse_time(text: object) -> datetime | None:
    """An ISO 8601 instant; None when it is none."""
    try:
        found = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def notice(body: str, provider: str) -> Notice | None:
    """A notice; None for an event of another kind. ValueError for what is no event at all.

    The warning comes two minutes ahead: `at` is when the machine goes. A recommendation has no such instant.
    """
    event = json.loads(body)
    if not isinstance(event, dict) or not isinstance(event.get("detail"), dict):
        raise ValueError("not an event of EventBridge")
    kind = _KINDS.get(str(event.get("detail-type")))
    if kind is None:
        return None
    instance_id = event["detail"].get("instance-id")
    if not isinstance(instance_id, str) or not instance_id:
        raise ValueError("an event without instance-id")
    sent = parse_time(event.get("time"))
    at = sent + timedelta(seconds=WARNING_S) if kind == "interruption" and sent is not None else None
    return Notice(provider, instance_id, kind, at)
