"""What a node has measured of its links since it last told.

Invariant: each measurement is told once; a heartbeat that is lost loses one, and the next window brings another.
"""

from __future__ import annotations

from typing import Any

from app.snapshots.puller import Puller
from app.snapshots.rates import News
from app.snapshots.relay import Relay


def measured_links(news: News, puller: Puller | None, relay: Relay | None) -> dict[str, Any]:
    """The fields of a Heartbeat that say so; empty without news."""
    told: dict[str, Any] = {}
    for kind, meter in () if puller is None else puller.meters.items():
        down = news.of(kind, meter)
        if down is not None and down.bytes_per_s > told.get("down_bytes_per_s", 0.0):
            told |= {"down_bytes_per_s": down.bytes_per_s, "down_source": kind}
    up = news.of("relay", None if relay is None else relay.meter)
    if up is not None:
        told |= {"up_bytes_per_s": up.bytes_per_s, "up_limited": up.limited}
    return told
