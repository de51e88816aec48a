"""The last things that a node does: its last word to the control service, and the end of its machine.

Invariant: neither raises for what the outside does, and neither takes longer than its time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

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
DESTROY_S = 600.0
"""So long a machine tries to end itself: one that hasn't ended is paid for."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two tries: doubled up to the second."""
GONE = ("no_such_instance", "not_found")
"""What vast.ai calls an instance that it doesn't have."""


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


async def destroy_machine(
    http: httpx.AsyncClient,
    machine: SelfDestruct,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """End the rented machine that this process runs on; it may not live to see the answer.

    Tried again and again: there may be nobody else to do it, and many machines do it at once when there isn't.
    """
    log.warning("ending this machine, instance %s", machine.instance)
    until, pause_s = clock() + DESTROY_S, PAUSE_S
    while failure := await _destroy(http, machine):
        log.warning("ending the machine failed: %s", failure)
        if clock() + pause_s > until:
            log.error("instance %s has not ended: it may still be paid for", machine.instance)
            return
        await sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _destroy(http: httpx.AsyncClient, machine: SelfDestruct) -> str:
    """Why the machine may not have ended; empty if it has."""
    url = f"{machine.url}/api/v0/instances/{machine.instance}/"
    headers, timeout = {"Authorization": f"Bearer {machine.key}"}, httpx.Timeout(15.0, connect=5.0)
    try:
        response = await http.delete(url, headers=headers, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return type(error).__name__
    try:
        said = response.json()
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {}
    reason = str(said.get("error") or "")
    # To a bad key vast.ai answers 404 as well, and a refusal may be a 200.
    ended = said.get("success") is not False if response.is_success else reason in GONE
    return "" if ended else f"HTTP {response.status_code}" + (f" ({reason[:100]})" if reason else "")
