"""The metadata services of EC2 and Google Cloud on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

ACTION, ADVICE = "spot/instance-action", "events/recommendations/rebalance"
WARNED = '{"action":"terminate","time":"2026-06-01T12:02:00Z"}'
ADVISED = '{"noticeTime":"2026-06-01T11:50:00Z"}'
PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.005)


@dataclass
class MetadataServer:
    """Values by their path below the root of either cloud; what is not there is 404."""

    values: dict[str, str] = field(default_factory=dict)
    token_uses: int = 1000
    """Questions that a token of EC2 is good for."""
    status: int = 200
    """Of every value."""
    flavor: str = "Google"
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and query of every question for a value."""
    tokens: int = 0
    held: int = 0
    """Long polls that wait for a change."""
    url: str = ""
    _left: int = 0
    _version: int = 1
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, path: str, value: str) -> None:
        """A value changes: long polls are answered."""
        self.values[path] = value
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def app(self) -> Starlette:
        """The HTTP side."""
        return Starlette(
            routes=[
                Route("/latest/api/token", self._token, methods=["PUT"]),
                Route("/latest/meta-data/{path:path}", self._ec2),
                Route("/computeMetadata/v1/{path:path}", self._gce),
            ]
        )

    async def _token(self, request: Request) -> Response:
        assert request.headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        self.tokens += 1
        self._left = self.token_uses
        return PlainTextResponse(f"token-{self.tokens}")

    async def _ec2(self, request: Request) -> Response:
        if request.headers.get("x-aws-ec2-metadata-token") != f"token-{self.tokens}" or self._left <= 0:
            return Response(status_code=401)
        self._left -= 1
        return self._value(request)

    async def _gce(self, request: Request) -> Response:
        assert request.headers["metadata-flavor"] == "Google"
        query = request.query_params
        if query.get("wait_for_change") == "true" and query.get("last_etag") == f"v{self._version}":
            self.held += 1
            try:
                await asyncio.wait_for(self._changed.wait(), float(query["timeout_sec"]))
            except TimeoutError:
                return self._value(request)
            finally:
                self.held -= 1
        return self._value(request)

    def _value(self, request: Request) -> Response:
        path = request.path_params["path"]
        self.asked.append((path, dict(request.query_params)))
        headers = {"ETag": f"v{self._version}", **({"Metadata-Flavor": self.flavor} if self.flavor else {})}
        if path not in self.values:
            return Response(status_code=404, headers=headers)
        return PlainTextResponse(self.values[path], self.status, headers)


@asynccontextmanager
async def metadata_server(**values: str) -> AsyncIterator[MetadataServer]:
    """A running server; `url` has its address."""
    made = MetadataServer(dict(values))
    config = uvicorn.Config(
        made.app(), host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    await until(lambda: server.started)
    made.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
