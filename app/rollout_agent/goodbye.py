"""The last things that a node does: its last word to the control service, and the end of its machine.

Invariant: neither raises for what the outside does, and neither takes longer than its time.
"""

from __future__ import annotations

import asyncio
import logging

import httpx

from app.protocol.errors import EchoError
from app.protocol.node import Leave
from app.rollout_agent.client import NodeClient
from app.rollout_agent.config import SelfDestruct
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.lifecycle import Ending

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 5.0
MOST_UNFINISHED = 4096
"""So many items a last word names at most; the others come back when the node is over."""


async def leave(client: NodeClient, ledger: WorkLedger, ending: Ending) -> None:
    """Say why, what was not finished, and the last totals."""
    word = Leave(
        reason=ending.reason[:500],
        unfinished=ledger.unfinished()[:MOST_UNFINISHED],
        tokens_generated=ledger.tokens_generated,
        tokens_wasted=dict(ledger.tokens_wasted),
        unfit=ending.unfit,
    )
    try:
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await client.leave(word)
    except (EchoError, TimeoutError) as error:
        log.warning("leaving was not heard: %s", getattr(error, "detail", "timeout"))


async def destroy_machine(http: httpx.AsyncClient, machine: SelfDestruct) -> None:
    """End the rented machine that this process runs on; it may not live to see the answer."""
    url = f"{machine.url}/api/v0/instances/{machine.instance}/"
    log.warning("ending this machine, instance %s", machine.instance)
    for _ in range(3):
        try:
            response = await http.delete(
                url, headers={"Authorization": f"Bearer {machine.key}"}, timeout=httpx.Timeout(15.0, connect=5.0)
            )
        except httpx.HTTPError as error:
            log.warning("ending the machine failed: %s", type(error).__name__)
            continue
        if response.is_success or response.status_code in (404, 410):
            return
        log.warning("ending the machine failed: HTTP %d", response.status_code)
