"""What stands before the routes: slashes, counting, rate limits, injected faults.

Invariant: every API request that arrives is counted, also one whose answer is then lost.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .faults import AFTER, BEFORE, Faults

_ID = r"/\d+$"
_CALLS = (
    ("POST", r"/api/v0/bundles$", "search"), ("PUT", r"/api/v0/search/asks$", "search"),
    ("PUT", r"/api/v0/asks" + _ID, "create"), ("GET", r"/api/v[01]/instances$", "list"),
    ("GET", r"/api/v0/instances" + _ID, "show"), ("DELETE", r"/api/v0/instances(/\d+)?$", "destroy"),
    ("PUT", r"/api/v0/instances/bid_price" + _ID, "bid"), ("PUT", r"/api/v0/instances/request_logs" + _ID, "logs"),
    ("PUT", r"/api/v0/instances(/\d+)?$", "state"), ("GET", r"/api/v0/users/current$", "user"),
    ("GET", r"/api/v0/charges$", "charges"),
)  # fmt: skip
THRESHOLDS = {
    "search": 6.0, "create": 4.5, "destroy": 3.0, "state": 1.0, "show": 2.0, "list": 1.0, "bid": 5.5, "charges": 1.0,
}  # fmt: skip
"""vast.ai's minimum seconds between two calls of one identity."""

Reply = tuple[int, bytes, bytes]


def call_name(method: str, path: str) -> str | None:
    """The name under which a request is counted; None for what is no API call."""
    for verb, pattern, name in _CALLS:
        if verb == method and re.fullmatch(pattern, path):
            return name
    return None


@dataclass(slots=True)
class Requests:
    """Requests that arrived."""

    calls: Counter[str] = field(default_factory=Counter)
    creates_by_label: Counter[str] = field(default_factory=Counter)
    creates_by_ask: Counter[str] = field(default_factory=Counter)


def _json_reply(status: int, body: object) -> Reply:
    return status, b"application/json", json.dumps(body).encode()


def canned(kind: str, threshold: float) -> Reply:
    """The answer of a fault that does nothing else."""
    if kind == "429":
        return 429, b"text/plain", f"API requests too frequent: endpoint threshold={threshold:g}".encode()
    if kind == "502_html":
        return 502, b"text/html", b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
    if kind == "auth_error":
        return _json_reply(404, {"success": False, "error": "auth_error", "msg": "Invalid user key"})
    if kind == "list_410":
        return _json_reply(410, {"success": False, "error": "deprecated_endpoint", "msg": "This endpoint is retired."})
    return _json_reply(500, {"detail": "Internal Server Error"})


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        part: bytes = message.get("body", b"")
        body += part
        if not message.get("more_body", False):
            return body


async def _answer(send: Send, reply: Reply) -> None:
    status, kind, body = reply
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Gate:
    """ASGI middleware. `cut` drops the client's connection without an answer."""

    def __init__(
        self, app: ASGIApp, faults: Faults, requests: Requests, rate_scale: float | None,
        now: Callable[[], float], cut: Callable[[Scope], None],
    ) -> None:  # fmt: skip
        self._app = app
        self._faults = faults
        self._requests = requests
        self._rate_scale = rate_scale
        self._now = now
        self._cut = cut
        self._last: dict[tuple[str, str], float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") or "/"
        scope = {**scope, "path": path, "raw_path": path.encode()}
        call = call_name(scope["method"], path)
        if call is None:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        self._count(call, path, body)
        limit = self._limit(call, scope)
        kind = self._faults.take(call)
        if limit is not None or kind in ("429",):
            await _answer(send, canned("429", limit if limit is not None else 0.05))
        elif kind == "drop_before":
            await self._drop(scope)
        elif kind in BEFORE:
            await _answer(send, canned(kind, 0.0))
        else:
            await self._pass(scope, body, send, kind)

    async def _pass(self, scope: Scope, body: bytes, send: Send, kind: str | None) -> None:
        scope["echo2.fault"] = kind
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def swallow(message: Message) -> None:
            del message

        await self._app(scope, replay, swallow if kind in AFTER else send)
        if kind == "500_after_process":
            await _answer(send, canned("500", 0.0))
        elif kind == "drop_after_process":
            await self._drop(scope)

    async def _drop(self, scope: Scope) -> None:
        self._cut(scope)
        # The server learns of the cut on its next turn; only then does it not answer for us.
        for _ in range(3):
            await asyncio.sleep(0)

    def _count(self, call: str, path: str, body: bytes) -> None:
        self._requests.calls[call] += 1
        if call != "create":
            return
        self._requests.creates_by_ask[path.rsplit("/", 1)[-1]] += 1
        try:
            order = json.loads(body)
        except ValueError:
            return
        if isinstance(order, dict):
            self._requests.creates_by_label[str(order.get("label") or "")] += 1

    def _limit(self, call: str, scope: Scope) -> float | None:
        """Seconds of the threshold that was not kept; None when it was."""
        if self._rate_scale is None or call not in THRESHOLDS:
            return None
        threshold = THRESHOLDS[call] * self._rate_scale
        identity = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"authorization"), "")
        now = self._now()
        last = self._last.get((call, identity))
        if last is not None and now - last < threshold:
            return threshold
        self._last[(call, identity)] = now
        return None
