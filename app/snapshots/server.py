"""uvicorn inside somebody else's process, with its connections' transports at hand.

Invariant: `transports` holds every open connection's under the address of its client, as requests name it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol


def transport_keeper(transports: dict[object, asyncio.Transport]) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which also keeps the transports by the address of their clients."""

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            transports[self.client] = transport

        def connection_lost(self, exc: Exception | None) -> None:
            transports.pop(self.client, None)
            super().connection_lost(exc)

    return Protocol


class Server(uvicorn.Server):
    """A server inside somebody else's process: signals are not its business, and readiness is an event."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
