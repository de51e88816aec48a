"""Google Cloud: what the metadata server says about the machine's end.

Invariant: only an answer that carries Google's own header counts; the preemption is asked for by a long poll from
the last value seen, so that none is missed between two questions.
"""

from __future__ import annotations

import httpx

from app.protocol.errors import Unavailable
from app.protocol.node import Interruption
from app.rollout_agent.preemption.metadata import ADDRESS, Metadata, unclear

WAIT_S = 20.0
"""How long the server may hold back an answer: it comes at once when the value changes."""
PAUSE_S = 1.0
"""Of the 30 seconds that a preempted machine is given; for a server that does not hold answers back."""
PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"
TERMINATES = "TERMINATE_ON_HOST_MAINTENANCE"
"""Told an hour before a machine with a GPU is ended for the host's maintenance."""
_ROOT = "/computeMetadata/v1"
_FLAVOR = {"Metadata-Flavor": "Google"}


class Gce:
    """One machine's metadata server."""

    def __init__(self, base_url: str = ADDRESS, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.pause_s = PAUSE_S
        self._metadata = Metadata(base_url, transport)
        self._etag = ""

    async def poll(self) -> list[Interruption]:
        """What it says now, after up to WAIT_S. Raises Unavailable."""
        if await self._preempted():
            # The server does not say when: up to 30 seconds from now.
            return [Interruption(kind="interruption", source="gce", detail=f"{PREEMPTED}: TRUE")]
        event = await self._read(MAINTENANCE, {}, 0.0)
        if event is None or event.text.strip() != TERMINATES:
            return []
        return [Interruption(kind="rebalance", source="gce", detail=f"{MAINTENANCE}: {TERMINATES}")]

    async def aclose(self) -> None:
        """Close connections."""
        await self._metadata.aclose()

    async def _preempted(self) -> bool:
        # The first question has to be answered at once: it may be so already.
        changed = {"wait_for_change": "true", "timeout_sec": f"{WAIT_S:.0f}", "last_etag": self._etag}
        answer = await self._read(PREEMPTED, changed if self._etag else {}, WAIT_S if self._etag else 0.0)
        if answer is None:
            return False
        value = answer.text.strip()
        if value not in ("TRUE", "FALSE"):
            raise unclear(PREEMPTED, answer)
        self._etag = answer.headers.get("etag", "")
        return value == "TRUE"

    async def _read(self, path: str, params: dict[str, str], wait_s: float) -> httpx.Response | None:
        """A value; None where the server has none (404)."""
        answer = await self._metadata.ask("GET", f"{_ROOT}/{path}", _FLAVOR, params=params, wait_s=wait_s)
        if answer.status_code == 404:
            return None
        if answer.headers.get("metadata-flavor") != "Google":
            raise Unavailable("what answers at its address is not Google's metadata server")
        if not answer.is_success:
            raise unclear(path, answer)
        return answer
