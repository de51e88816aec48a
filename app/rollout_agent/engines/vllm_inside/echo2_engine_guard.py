"""A key on every path of the engine's server, which checks its own key on some of them only.

Invariant: a request without `Authorization: Bearer $ECHO2_ENGINE_KEY` reaches nothing of the server, whatever its path
or method. Loaded inside vLLM's server (`--middleware`), so it imports the standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "ECHO2_ENGINE_KEY"
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class Guard:
    """Pure ASGI middleware; the key comes from the environment, never from the command line, which others can read."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Let through what has the key, and what is no request at all."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = b"".join(value for name, value in scope.get("headers", ()) if name == b"authorization")
        if hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})
