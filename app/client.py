"""A small client of the REST API, for the command line and the demo.

Invariant: a problem document becomes an EchoError with its code and fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx

from app.protocol.errors import EchoError, FieldError, Malformed, Unauthorized, Unavailable

TIMEOUT = httpx.Timeout(30.0, connect=5.0)


class Problem(EchoError):
    """What the service answered in place of a result."""

    def __init__(self, body: Mapping[str, Any], status: int) -> None:
        errors = [FieldError(str(e.get("pointer", "")), str(e.get("detail", ""))) for e in body.get("errors", [])]
        super().__init__(str(body.get("detail") or body.get("title") or f"HTTP {status}"), errors=errors)
        self.code = str(body.get("code", f"http_{status}"))
        self.status = status


def address() -> str:
    """Where the service is: ECHO2_URL, else ECHO2_PUBLIC_URL, else the default. Raises Malformed."""
    url = os.environ.get("ECHO2_URL") or os.environ.get("ECHO2_PUBLIC_URL") or "http://127.0.0.1:8080"
    if not url.startswith(("http://", "https://")):
        raise Malformed("ECHO2_URL is not a URL of http or https; expected one such as http://127.0.0.1:8080")
    return url.rstrip("/")


def api_key() -> str:
    """The caller's key: ECHO2_API_KEY, else ECHO2_ADMIN_KEY. Raises Unauthorized."""
    key = os.environ.get("ECHO2_API_KEY") or os.environ.get("ECHO2_ADMIN_KEY")
    if not key:
        raise Unauthorized("set ECHO2_API_KEY to an API key of the service")
    return key


def client(url: str | None = None, key: str | None = None) -> httpx.Client:
    """An HTTP client with the key in its header."""
    return httpx.Client(
        base_url=url or address(), headers={"Authorization": f"Bearer {key or api_key()}"}, timeout=TIMEOUT
    )


def unwrap(response: httpx.Response, *, text: bool = False) -> Any:
    """The body of a good answer. Raises Problem otherwise."""
    if response.is_success:
        return response.text if text else (response.json() if response.content else None)
    try:
        body = response.json()
    except ValueError:
        body = {}
    raise Problem(body if isinstance(body, dict) else {}, response.status_code)


def call(
    method: str, path: str, body: Any = None, *, text: bool = False, params: Mapping[str, Any] | None = None
) -> Any:
    """One call. Raises Problem, or Unavailable when nobody answers."""
    headers = {"Accept": "text/plain" if text else "application/json"}
    try:
        with client() as http:
            return unwrap(http.request(method, path, json=body, params=params, headers=headers), text=text)
    except httpx.TransportError as error:
        raise Unavailable(f"no answer from {address()}: {error}; is `echo2 serve` running?") from error
