"""The cloud's metadata service, as seen from the machine.

Invariant: it is asked directly, never through a proxy, and every question has a timeout; 404 means that there is no
such value; whatever else is not a clear answer is Unavailable and never counts as a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import httpx

from app.protocol.errors import Unavailable
from app.protocol.node import Interruption

TIMEOUT_S = 2.0
"""It is on the same host; the watch asks again."""
ADDRESS = "http://169.254.169.254"
"""The same on every cloud, and no name has to be resolved."""


class Source(Protocol):
    """A metadata service that tells of interruptions."""

    pause_s: float
    """Seconds between two questions."""

    async def poll(self) -> list[Interruption]:
        """What it says now, an interruption first; [] while it says nothing. Raises Unavailable."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


class Metadata:
    """HTTP to a metadata service. `transport` None: the network."""

    def __init__(self, base_url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, transport=transport, timeout=TIMEOUT_S, trust_env=False)

    async def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        params: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> httpx.Response:
        """Any answer. `wait_s`: how long the service may hold it back. Raises Unavailable if there is none."""
        timeout = httpx.Timeout(TIMEOUT_S, read=TIMEOUT_S + wait_s)
        try:
            return await self._http.request(method, path, headers=dict(headers), params=params, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unavailable(f"the metadata service can't be reached ({type(error).__name__})") from error

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()


def unclear(path: str, answer: httpx.Response) -> Unavailable:
    """The error for an answer that is neither a value nor 404."""
    return Unavailable(f"the metadata service answers {path} with HTTP {answer.status_code} that can't be read")
