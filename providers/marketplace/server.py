"""The marketplace as a service.

Invariant: when it has stopped, no machine process lives and the bill is closed and on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import api, charges, control, increases
from .clock import NS, Clock, SystemClock
from .config import ConfigError, MarketConfig, load_machines
from .faults import Faults
from .gate import Gate, Requests
from .host import Host
from .market import Market
from .processes import kill_leftover
from .refusals import Refused
from .store import Store

log = logging.getLogger(__name__)
START_S = 15.0
STOP_S = 20.0

Peers = dict[tuple[str, int], asyncio.Transport]


async def _refused(request: Request, error: Exception) -> Response:
    del request
    if not isinstance(error, Refused):
        raise error
    return JSONResponse(error.body, status_code=error.status)


async def _tick(machines: Host, every_s: float) -> None:
    while True:
        await machines.tick()
        await asyncio.sleep(every_s)


def create_app(config: MarketConfig, clock: Clock | None = None) -> FastAPI:
    """The ASGI application. Its lifespan runs the machines; ConfigError when the settings or the folder are wrong."""
    time = clock or SystemClock()
    specs = [replace(spec, speed=spec.speed * config.speed) for spec in load_machines(config.machines_file)]
    market = Market(config, specs, time, Store(config.state_dir), kill_leftover)
    machines = Host(market, f"http://{config.host}:{config.port}")
    peers: Peers = {}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ticking = asyncio.create_task(_tick(machines, config.tick_s))
        ticking.add_done_callback(lambda task: _ended(app, task))
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.wait([ticking], timeout=STOP_S)
            await machines.close()
            market.close()

    app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.market, app.state.machines, app.state.peers = market, machines, peers
    app.state.faults, app.state.requests, app.state.results = Faults(), Requests(), {}
    app.state.on_failure = lambda: None
    app.add_exception_handler(Refused, _refused)
    # Before the paths that take a number where these have a word.
    app.include_router(increases.router)
    app.include_router(api.router)
    app.include_router(charges.router)
    if config.control_enabled:
        app.include_router(control.router)
    app.add_middleware(
        Gate, faults=app.state.faults, requests=app.state.requests, now=lambda: time.now_ns() / NS,
        rate_scale=config.rate_scale if config.rate_limits else None, cut=lambda scope: _cut(peers, scope),
    )  # fmt: skip
    return app


def _ended(app: FastAPI, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the marketplace's clock stopped", exc_info=error)
        app.state.on_failure()


def _cut(peers: Peers, scope: Scope) -> None:
    client = scope.get("client")
    transport = peers.get((client[0], client[1])) if client else None
    if transport is None:
        raise RuntimeError("drop faults need MarketServer: no connection is known here")
    transport.abort()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: who embeds it decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop."""
        self.should_exit = True


def _protocol(peers: Peers) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which also remembers each connection so that a fault can cut it."""

    class Tracked(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._peer = transport.get_extra_info("peername")
            peers[(self._peer[0], self._peer[1])] = transport

        def connection_lost(self, exc: Exception | None) -> None:
            peers.pop((self._peer[0], self._peer[1]), None)
            super().connection_lost(exc)

    return Tracked


class MarketServer:
    """A marketplace on a real port: `async with MarketServer(config) as market: market.url`."""

    def __init__(self, config: MarketConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""
        self.app: FastAPI | None = None

    async def start(self) -> None:
        """Bind, start, and return once it answers. Raises ConfigError when it can't."""
        bound = socket.socket(socket.AF_INET6 if ":" in self.config.host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.config.host, self.config.port))
            self.app = create_app(self.config, self._clock)
        except OSError as error:
            bound.close()
            raise ConfigError(f"can't listen on {self.config.host}:{self.config.port}: {error.strerror}") from error
        except ConfigError:
            bound.close()
            raise
        port = bound.getsockname()[1]
        self.url = f"http://{self.config.host}:{port}"
        self.app.state.machines.public_url = self.url
        settings: dict[str, Any] = {"lifespan": "on", "access_log": False, "log_config": None, "ws": "none"}
        self._server = _Server(uvicorn.Config(
            self.app, http=_protocol(self.app.state.peers), timeout_graceful_shutdown=3, **settings
        ))  # fmt: skip
        self.app.state.on_failure = self.request_stop
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]))
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._task.done():
                    raise ConfigError("the marketplace did not start; its log says why")
                await asyncio.sleep(0.01)

    def request_stop(self) -> None:
        """Ask it to stop; `wait` returns when it has."""
        if self._server is not None:
            self._server.should_exit = True

    async def wait(self) -> None:
        """Return when it has stopped."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End all machines, close the bill, stop."""
        self.request_stop()
        async with asyncio.timeout(STOP_S):
            await self.wait()

    async def __aenter__(self) -> MarketServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()


async def serve(config: MarketConfig, ready: Callable[[str], None] = lambda url: None) -> None:
    """Run until SIGTERM or SIGINT. `ready` is called with the address once it answers."""
    server = MarketServer(config)
    loop = asyncio.get_running_loop()
    await server.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    try:
        log.info("marketplace on %s", server.url)
        ready(server.url)
        await server.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await server.stop()
