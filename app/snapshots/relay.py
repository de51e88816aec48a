"""The HTTP server that passes snapshots on: the learner's and every node's.

Invariant: whoever lacks the job's relay token gets nothing, and a request that is out of bounds gets an error with the
bounds. Once it has stopped, or could not start, neither socket nor connection of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.protocol.errors import BadInput, EchoError, NotFound, Unauthorized, Unavailable
from app.snapshots.headers import BASES, DELTA_SIZE, FOLLOW
from app.snapshots.incoming import Reader
from app.snapshots.pacer import HEADROOM, PACKETS, Pacer, Shares
from app.snapshots.query import bases, leaf_count, seconds, whole
from app.snapshots.rates import SendMeter
from app.snapshots.server import Server, transport_keeper
from app.snapshots.serving import Outlet, Stream
from app.snapshots.store import SnapshotStore

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
THREAD_MARGIN_S = 15.0
"""Beyond START_TIMEOUT_S: so long the relay's thread has to clean up and to say why it did not start."""


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
        self._store = store
        self._token = token.encode()
        self._host = host
        self._outlet = Outlet(
            store.changes,
            Pacer(None if uplink_bytes_per_s is None else uplink_bytes_per_s * HEADROOM / PACKETS),
            Shares(uplink_bytes_per_s),
        )
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._thread_stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def bytes_served(self) -> int:
        """Payload bytes handed to the network."""
        return self._outlet.bytes_served

    @property
    def meter(self) -> SendMeter:
        """The rate at which it took them."""
        return self._outlet.meter

    async def start(self) -> None:
        """Listen; returns when connections are accepted. Raises OSError if the address can't be bound, Unavailable."""
        sock = _bound(self._host, self.port)
        self.port = sock.getsockname()[1]
        self._server = Server(self._config())
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            await asyncio.wait({ready, self._serving}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ended = self._serving.done() and not self._serving.cancelled()
                raise Unavailable("the relay's server did not start") from (
                    self._serving.exception() if ended else None
                )
        except BaseException:
            # Cancelled too, nobody else knows the server: it ends, and the error goes on.
            serving, self._serving = self._serving, None
            self._server.should_exit = True
            await asyncio.wait({serving}, timeout=STOP_TIMEOUT_S)
            serving.cancel()
            sock.close()
            raise
        finally:
            ready.cancel()

    async def stop(self) -> None:
        """End all streams and stop listening; a second call does nothing. TimeoutError if the server does not end."""
        self._outlet.stopping = True
        self._store.changes.notify()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        serving, self._serving = self._serving, None
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await serving
        finally:
            # The server waits a moment for what was sent to be taken; who takes nothing would keep his connection.
            for transport in list(self._outlet.connections.values()):
                transport.abort()

    def run_in_thread(self) -> None:
        """Serve from a thread with its own event loop; returns when it accepts connections, raises what start does."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._thread_main, args=(started,), name="relay", daemon=True)
        self._thread.start()
        started.result(START_TIMEOUT_S + THREAD_MARGIN_S)

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

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app(),
            http=transport_keeper(self._outlet.connections),
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=90,
            timeout_graceful_shutdown=1,
        )

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
                        return Stream(self._outlet, reader, 0, document, headers)
                return Response(document, media_type="application/json", headers=headers)
            left = deadline - loop.time()
            if left <= 0 or self._outlet.stopping or await request.is_disconnected():
                return Response(status_code=204)
            await changes.wait(seen, min(left, 5.0))

    async def _stream(self, request: Request) -> Response:
        return self._leaves(request, self._store.open, "version")

    async def _delta(self, request: Request) -> Response:
        return self._leaves(request, self._store.open_delta, "the delta of version")

    def _leaves(self, request: Request, opened: Callable[[int], Reader | None], what: str) -> Stream:
        self._authorise(request)
        version = whole(request.path_params["version"], "version", 0)
        first = whole(request.query_params.get("from_leaf", "0"), "from_leaf", 0)
        count = leaf_count(request.query_params.get("leaves"))
        # Last: a reader that no stream closes would keep the version for good.
        reader = opened(version)
        if reader is None:
            raise NotFound(f"{what} {version} is not here")
        return Stream(self._outlet, reader, first, count=count)

    def _authorise(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            raise Unauthorized("send the job's relay token as Authorization: Bearer …")


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it every hop costs 40 ms more.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, EchoError)
    body = {"title": error.title, "status": error.status, "code": error.code, "detail": error.detail}
    return JSONResponse(body, status_code=error.status, media_type="application/problem+json")
