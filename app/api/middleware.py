"""What every request passes through: an id, a limit on its body, an answer where the end of the service cuts it off.

Invariant: no handler sees more bytes of a body than its limit, whatever Content-Length says or leaves out; and every
answer carries `X-Request-Id`.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.problems import REQUEST_ID_HEADER, problem
from app.protocol.errors import Malformed, TooLarge, Unavailable

DEFAULT_MAX_BODY_BYTES = 1 << 20
DRAIN_BYTES = 16 << 20
"""A client that sends first and reads later would see a broken connection, not the answer: so much more is read."""
DRAIN_SECONDS = 5.0

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

LimitFor = Callable[[str, str], int | None]
"""(method, path) → largest body in bytes; None for the default."""


def _random_id() -> str:
    return uuid.uuid4().hex


def _no_override(method: str, path: str) -> int | None:
    return None


def install(app: Starlette, *, max_bytes: int = DEFAULT_MAX_BODY_BYTES, limit_for: LimitFor = _no_override) -> None:
    """Add them to `app`; the id is outermost, so that a refused body has one too."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_bytes, limit_for=limit_for)
    app.add_middleware(StoppingMiddleware)
    app.add_middleware(RequestIdMiddleware)


class RequestIdMiddleware:
    """Keeps the client's `X-Request-Id` if it is a sane one, else makes one; it is `request.state.request_id`."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str] = _random_id) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._new_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class StoppingMiddleware:
    """Answers 503 to what the server cuts off when it stops: long polls are longer than it waits. To the server a
    request that is cut off is a failure with a traceback, to whoever asked a broken connection.

    `app.state.stopping` says that it stops; at other times whoever cancels a request has it cancelled.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            stopping = getattr(scope["app"].state, "stopping", False) if scope["type"] == "http" else False
            if started or not stopping:
                raise
            error = Unavailable("the service is being stopped, and what was asked for may or may not have been done")
            await problem(error, {"Connection": "close"})(scope, receive, send)


class BodyLimitMiddleware:
    """Answers 413 to a body that is too large, before the handler has it or while it reads."""

    def __init__(
        self, app: ASGIApp, *, max_bytes: int = DEFAULT_MAX_BODY_BYTES, limit_for: LimitFor = _no_override
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._limit_for = limit_for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            # PostgreSQL keeps no text with one, and no name here has one.
            await problem(Malformed("an address can't hold a zero byte"))(scope, receive, send)
            return
        override = self._limit_for(scope["method"], scope["path"])
        limit = self._max_bytes if override is None else override
        error = TooLarge(f"the body is larger than the {limit} bytes that {scope['method']} {scope['path']} takes")
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            # A client that asks first (Expect: 100-continue) has sent nothing yet; to read would be to say "go on".
            await _refuse(error, scope, receive, send, unread="expect" not in headers)
            return
        await self._limited(limit, error, scope, receive, send)

    async def _limited(self, limit: int, error: TooLarge, scope: Scope, receive: Receive, send: Send) -> None:
        seen, started, unread = 0, False, True

        async def counted() -> Message:
            nonlocal seen, unread
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                unread = message.get("more_body", False)
                if seen > limit:
                    raise error
            return message

        async def unless_refused(message: Message) -> None:
            nonlocal started
            # A framework between may have made an answer of its own out of our error.
            if seen > limit and not started:
                return
            started = True
            await send(message)

        try:
            await self._app(scope, counted, unless_refused)
        except TooLarge as raised:
            if raised is not error or started:
                raise
        if seen > limit and not started:
            await _refuse(error, scope, receive, send, unread=unread)


async def _refuse(error: TooLarge, scope: Scope, receive: Receive, send: Send, *, unread: bool) -> None:
    """Read what is unread for a while without keeping anything, then answer and close."""
    left = DRAIN_BYTES if unread else 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect":
                    return
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await problem(error, {"Connection": "close"})(scope, receive, send)
