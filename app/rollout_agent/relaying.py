"""A node's relay: what it passes on to peers.

Invariant: a node whose relay can't be had works on as a leaf.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from app.protocol.errors import Unavailable
from app.protocol.node import JoinAnswer
from app.rollout_agent.config import RelayAddress
from app.snapshots.relay import Relay
from app.snapshots.store import SnapshotStore

log = logging.getLogger(__name__)


async def start_relay(
    store: SnapshotStore, address: RelayAddress, joined: JoinAnswer, *, failed: Callable[[], None]
) -> Relay | None:
    """Serve peers if they can reach this machine; None for a leaf. `failed` is called where it should, and can't."""
    if address.public_url is None:
        return None
    relay = Relay(
        store,
        token=joined.relay_token,
        host=address.host,
        port=address.port,
        uplink_bytes_per_s=joined.uplink_bytes_per_s,
    )
    try:
        await relay.start()
    except (OSError, Unavailable) as error:
        failed()
        log.error("no relay on port %d: %s", address.port, error)
        return None
    return relay
