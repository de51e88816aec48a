"""The HTTP server that passes snapshots on: the learner's and every node's.

Invariant: only verified leaves leave here, in order, each as soon as it is verified; whoever lacks the job's relay
token gets nothing. Sending is paced over all streams together.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.protocol.errors import BadInput, EchoError, IntegrityError, NotFound, Unauthorized, Unavailable
from app.snapshots.frames import KEEP_ALIVE, KEEP_ALIVES, frame, stream_bytes
from app.snapshots.incoming import Reader
from app.snapshots.pacer import HEADROOM, PACKETS, Pacer, Shares
from app.snapshots.query import bases, leaf_count, seconds, whole
from app.snapshots.server import Server, transport_keeper
from app.snapshots.store import SnapshotStore
from app.snapshots.upstream import BASES, DELTA_SIZE, DOCUMENT_SIZE, FOLLOW

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 0.5
SEND_TIMEOUT_S = 120.0
"""A child that takes nothing at all for so long is cut off: an open stream holds a version on disk."""
INLINE_LEAF_BYTES = 1024 * 1024
"""Leaves up to this size are read in the event loop; larger ones in a thread."""
LEAVES_A_TURN = 8
"""Sent at most before the rest of the process has its turn. One would not do: on a busy machine turns are rare, and as
many must go out in one as came in meanwhile, or the next hop starves beside a full disk."""
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


class Relay:
    """Serves a SnapshotStore on `host`:`port` (0: a free one, then in `port`). One start and one stop.

    `uplink_bytes_per_s` is what this machine's uplink can carry, None if unknown (no pacing).
    """

    def __init__(
        self, store: SnapshotStore, *, token: str, host: str, port: int, uplink_bytes_per_s: float | None
    ) -> None:
        if not token:
            raise BadInput("the relay token must not be empty")
        self.port = port
        self.bytes_served = 0
        """Payload bytes handed to the network."""
        self._store = store
        self._token = token.encode()
        self._host = host
        self._pacer = Pacer(None if uplink_bytes_per_s is None else uplink_bytes_per_s * HEADROOM / PACKETS)
        self._shares = Shares(uplink_bytes_per_s)
        self._connections: dict[object, asyncio.Transport] = {}
        self._stopping = False
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._thread_stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def start(self) -> None:
        """Listen; returns when connections are accepted. Raises OSError if the address can't be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only where the protocol is named; with it every hop costs 40 ms more.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, self.port))
        except OSError:
            sock.close()
            raise
        self.port = sock.getsockname()[1]
        self._server = Server(
            uvicorn.Config(
                self._app(),
                http=transport_keeper(self._connections),
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=90,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({ready, self._serving}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            self._serving.cancel()
            raise Unavailable("the relay's server did not start; its log says why")

    async def stop(self) -> None:
        """End all streams and stop listening; a second call does nothing."""
        self._stopping = True
        self._store.changes.notify()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            serving, self._serving = self._serving, None
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await serving

    def run_in_thread(self) -> None:
        """Serve from a thread with its own event loop; returns when it accepts connections, raises what start does."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._thread_main, args=(started,), name="relay", daemon=True)
        self._thread.start()
        started.result(START_TIMEOUT_S)

    def stop_thread(self) -> None:
        """Stop what `run_in_thread` started and wait for it; a second call does nothing."""
        if self._thread is None or self._thread_stop is None:
            return
        loop, stop = self._thread_stop
        with contextlib.suppress(RuntimeError):  # the loop ended by itself
            loop.call_soon_threadsafe(stop.set)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise Unavailable(f"the relay did not stop within {STOP_TIMEOUT_S:.0f} s")
        self._thread = None

    def _thread_main(self, started: Future[None]) -> None:
        async def serve() -> None:
            stop = asyncio.Event()
            self._thread_stop = (asyncio.get_running_loop(), stop)
            try:
                await self.start()
            except (OSError, EchoError) as error:
                started.set_exception(error)
                return
            started.set_result(None)
            await stop.wait()
            await self.stop()

        try:
            asyncio.run(serve())
        finally:
            if not started.done():
                started.set_exception(Unavailable("the relay's thread ended while starting"))

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/snapshots/next", self._next, methods=["GET"]),
                Route("/snapshots/{version}/stream", self._stream, methods=["GET"]),
                Route("/snapshots/{version}/delta", self._delta, methods=["GET"]),
            ],
            exception_handlers={EchoError: _problem},
        )

    async def _next(self, request: Request) -> Response:
        """Long poll for the next step to the newest version after `after` that can be reached with what is here."""
        self._authorise(request)
        held = bases(request.headers.get(BASES, ""))
        after = whole(request.query_params.get("after", "-1"), "after", -1)
        wait_s = seconds(request.query_params.get("wait_s", "0"))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        changes = self._store.changes
        while True:
            seen = changes.count
            found = self._store.announce(after, held)
            if found is not None:
                document, headers = found.document + found.delta, {"Echo2-Version": str(found.version)}
                if found.delta:
                    headers[DELTA_SIZE] = str(len(found.delta))
                if request.headers.get(FOLLOW) == "1":
                    reader = (self._store.open_delta if found.delta else self._store.open)(found.version)
                    if reader is not None:
                        return _Stream(self, reader, 0, document, headers)
                return Response(document, media_type="application/json", headers=headers)
            left = deadline - loop.time()
            if left <= 0 or self._stopping or await request.is_disconnected():
                return Response(status_code=204)
            await changes.wait(seen, min(left, 5.0))

    async def _stream(self, request: Request) -> Response:
        self._authorise(request)
        version = whole(request.path_params["version"], "version", 0)
        first = whole(request.query_params.get("from_leaf", "0"), "from_leaf", 0)
        reader = self._store.open(version)
        if reader is None:
            raise NotFound(f"version {version} is not here")
        return _Stream(self, reader, first, count=leaf_count(request.query_params.get("leaves")))

    async def _delta(self, request: Request) -> Response:
        self._authorise(request)
        version = whole(request.path_params["version"], "version", 0)
        first = whole(request.query_params.get("from_leaf", "0"), "from_leaf", 0)
        reader = self._store.open_delta(version)
        if reader is None:
            raise NotFound(f"the delta of version {version} is not here")
        return _Stream(self, reader, first, count=leaf_count(request.query_params.get("leaves")))

    async def _send_leaves(
        self, reader: Reader, first: int, end: int, send: Send, gone: asyncio.Future[None], paced: bool
    ) -> bool:
        """Frames of the leaves `first` … `end` − 1. True after the padding; False when no more will come."""
        loop = asyncio.get_running_loop()
        changes = self._store.changes
        n = first
        keep_alive_at = loop.time() + KEEP_ALIVE_S
        send_at: float | None = None
        alive = 0
        while n < end and not self._stopping and not gone.done():
            seen, over = changes.count, reader.over
            now = loop.time()
            ready = n < reader.ready
            if ready and send_at is None:
                send_at = now if paced else now + self._pacer.reserve(reader.manifest.leaf_size(n))
            if ready and send_at is not None and now >= send_at:
                await _send_body(send, frame(n, await _read(reader, n)))
                self.bytes_served += reader.manifest.leaf_size(n)
                n, send_at = n + 1, None
                if n % LEAVES_A_TURN == 0:
                    await asyncio.sleep(0)  # while the socket takes all, nothing else would have its turn
                keep_alive_at = loop.time() + KEEP_ALIVE_S
            elif (not ready and over) or alive == KEEP_ALIVES:
                return False
            elif now >= keep_alive_at:
                await _send_body(send, KEEP_ALIVE)
                alive += 1
                keep_alive_at = loop.time() + KEEP_ALIVE_S
            elif send_at is not None:
                await asyncio.sleep(min(send_at, keep_alive_at) - now)
            else:
                await changes.wait(seen, keep_alive_at - now)
        if n < end:
            return False
        await _send_body(send, KEEP_ALIVE * (KEEP_ALIVES - alive))
        return True

    def _authorise(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            raise Unauthorized("send the job's relay token as Authorization: Bearer …")


class _Stream(Response):
    """Leaves from `first` on, all or `count` of them, after `document` if there is one.

    Written as an ASGI response so that the reader is closed in every case.
    """

    media_type = "application/octet-stream"

    def __init__(
        self,
        relay: Relay,
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
        self._relay = relay
        self._reader = reader
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        transport = self._relay._connections.get(scope.get("client"))
        sock = None if transport is None else transport.get_extra_info("socket")
        try:
            with self._reader, self._relay._shares.of(sock, origin=self._reader.over) as paced:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if self._document:
                    await _send_body(send, self._document)
                complete = await self._relay._send_leaves(self._reader, self._first, self._end, send, gone, paced)
            if complete:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif transport is not None:
                # What was sent goes out, then the connection ends, and the child turns elsewhere.
                transport.close()
                await asyncio.wait({gone}, timeout=STOP_TIMEOUT_S)
        except (TimeoutError, IntegrityError) as error:
            # The response stays unfinished: the server drops the connection and the child turns elsewhere.
            log.warning("stream of v%d broken off: %s", self._reader.manifest.version, error or "child takes nothing")
        finally:
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _read(reader: Reader, n: int) -> bytes:
    if reader.manifest.leaf_size(n) <= INLINE_LEAF_BYTES:
        return reader.read(n)
    return await asyncio.to_thread(reader.read, n)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, EchoError)
    body = {"title": error.title, "status": error.status, "code": error.code, "detail": error.detail}
    return JSONResponse(body, status_code=error.status, media_type="application/problem+json")
