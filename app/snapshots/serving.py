"""Leaves of a version as the body of an answer, as they become ready.

Invariant: leaves go out in order, each once it is verified, and no faster than the link takes them. However a stream
ends, its reader is closed; a child that takes nothing is cut off, its connection with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.protocol.errors import IntegrityError
from app.snapshots.changes import Changes
from app.snapshots.frames import KEEP_ALIVE, KEEP_ALIVES, frame, stream_bytes
from app.snapshots.headers import DOCUMENT_SIZE
from app.snapshots.incoming import Reader
from app.snapshots.pacer import Pacer, Shares
from app.snapshots.rates import SendMeter

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 0.5
SEND_TIMEOUT_S = 120.0
"""A child that takes nothing at all for so long is cut off: an open stream holds a version on disk."""
CLOSE_TIMEOUT_S = 10.0
"""So long a child has to take what was sent to it before a stream that ends early."""
INLINE_LEAF_BYTES = 1024 * 1024
"""Leaves up to this size are read in the event loop; larger ones in a thread."""
LEAVES_A_TURN = 8
"""Sent at most before the rest of the process has its turn. One would not do: on a busy machine turns are rare, and as
many must go out in one as came in meanwhile, or the next hop starves beside a full disk."""


@dataclass(slots=True)
class Outlet:
    """What all streams of a relay share. One event loop."""

    changes: Changes
    pacer: Pacer
    shares: Shares
    connections: dict[object, asyncio.Transport] = field(default_factory=dict)
    """By the address of the client."""
    meter: SendMeter = field(default_factory=SendMeter)
    bytes_served: int = 0
    """Payload bytes handed to the network."""
    stopping: bool = False
    send_timeout_s: float = SEND_TIMEOUT_S


class Stream(Response):
    """Leaves from `first` on, all or `count` of them, after `document` if there is one.

    Written as an ASGI response so that the reader is closed in every case.
    """

    media_type = "application/octet-stream"

    def __init__(
        self,
        outlet: Outlet,
        reader: Reader,
        first: int,
        document: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        count: int | None = None,
    ) -> None:
        version = str(reader.manifest.version)
        self._end = reader.manifest.leaves if count is None else min(first + count, reader.manifest.leaves)
        super().__init__(headers={"Cache-Control": "no-store", "Echo2-Version": version, **(headers or {})})
        self.headers["content-length"] = str(len(document) + stream_bytes(reader.manifest, first, self._end))
        if document:
            self.headers[DOCUMENT_SIZE] = str(len(document))
        self._document = document
        self._outlet = outlet
        self._reader = reader
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = self._outlet
        gone = asyncio.ensure_future(_disconnected(receive))
        transport = outlet.connections.get(scope.get("client"))
        sock = None if transport is None else transport.get_extra_info("socket")
        try:
            with self._reader, outlet.meter.stream(), outlet.shares.of(sock, origin=self._reader.over) as paced:
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if self._document:
                    await self._send_body(send, self._document)
                complete = await self._send_leaves(send, gone, paced)
            if complete:
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            elif transport is not None:
                # What was sent goes out, then the connection ends, and the child turns elsewhere.
                transport.close()
                await _cut_off(transport, gone, CLOSE_TIMEOUT_S)
        except TimeoutError:
            log.warning("stream of v%d broken off: child takes nothing", self._reader.manifest.version)
            if transport is not None:
                await _cut_off(transport, gone, 0)
        except IntegrityError as error:
            # The response stays unfinished: the server drops the connection and the child turns elsewhere.
            log.warning("stream of v%d broken off: %s", self._reader.manifest.version, error)
        finally:
            gone.cancel()

    async def _send_leaves(self, send: Send, gone: asyncio.Future[None], paced: bool) -> bool:
        """Frames of the leaves. True after the padding; False when no more will come."""
        outlet, reader, end = self._outlet, self._reader, self._end
        loop = asyncio.get_running_loop()
        n = self._first
        keep_alive_at = loop.time() + KEEP_ALIVE_S
        send_at: float | None = None
        alive = 0
        while n < end and not outlet.stopping and not gone.done():
            seen, over = outlet.changes.count, reader.over
            now = loop.time()
            ready = n < reader.ready
            if ready and send_at is None:
                send_at = now if paced else now + outlet.pacer.reserve(reader.manifest.leaf_size(n))
            if ready and send_at is not None and now >= send_at:
                await self._send_leaf(send, n)
                n, send_at = n + 1, None
                if n % LEAVES_A_TURN == 0:
                    await asyncio.sleep(0)  # while the socket takes all, nothing else would have its turn
                keep_alive_at = loop.time() + KEEP_ALIVE_S
            elif (not ready and over) or alive == KEEP_ALIVES:
                return False
            elif now >= keep_alive_at:
                await self._send_body(send, KEEP_ALIVE)
                alive += 1
                keep_alive_at = loop.time() + KEEP_ALIVE_S
            elif send_at is not None:
                await asyncio.sleep(min(send_at, keep_alive_at) - now)
            else:
                with outlet.meter.starving():
                    await outlet.changes.wait(seen, keep_alive_at - now)
        if n < end:
            return False
        await self._send_body(send, KEEP_ALIVE * (KEEP_ALIVES - alive))
        return True

    async def _send_leaf(self, send: Send, n: int) -> None:
        size = self._reader.manifest.leaf_size(n)
        body = frame(n, await _read(self._reader, n))
        with self._outlet.meter.sending(size):
            await self._send_body(send, body)
        self._outlet.bytes_served += size

    async def _send_body(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        """TimeoutError when the child takes nothing; the first and the last message wait for the socket, too."""
        async with asyncio.timeout(self._outlet.send_timeout_s):
            await send(message)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cut_off(transport: asyncio.Transport, gone: asyncio.Future[None], grace_s: float) -> None:
    """End a connection that isn't `gone` after `grace_s`. To close it is not enough: that waits until all is taken."""
    if grace_s:
        await asyncio.wait({gone}, timeout=grace_s)
    if not gone.done():
        transport.abort()
        await asyncio.wait({gone}, timeout=CLOSE_TIMEOUT_S)


async def _read(reader: Reader, n: int) -> bytes:
    if reader.manifest.leaf_size(n) <= INLINE_LEAF_BYTES:
        return reader.read(n)
    return await asyncio.to_thread(reader.read, n)
