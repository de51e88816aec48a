"""A small client of the REST API, for the command line and the demo.

Invariant: a problem document becomes an EchoError with its code and fields; no error repeats the key, and the key is
not shown to a proxy on its way to a service on this computer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from app.protocol.errors import EchoError, FieldError, Malformed, Unauthorized, Unavailable
from app.settings_values import http_url

TIMEOUT = httpx.Timeout(30.0, connect=5.0)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Problem(EchoError):
    """What the service answered in place of a result."""

    def __init__(self, body: Mapping[str, Any], status: int, otherwise: str) -> None:
        named = body.get("errors")
        rows = [e for e in named if isinstance(e, dict)] if isinstance(named, list) else []
        errors = [FieldError(str(e.get("pointer", "")), str(e.get("detail", ""))) for e in rows]
        super().__init__(str(body.get("detail") or body.get("title") or otherwise), errors=errors)
        self.code = str(body.get("code", f"http_{status}"))
        self.status = status


def _given(*names: str) -> tuple[str, str]:
    """The first of these variables that is set, and its value; two empty texts if none is."""
    return next(((name, value) for name in names if (value := os.environ.get(name))), ("", ""))


def address() -> str:
    """Where the service is: ECHO2_URL, else ECHO2_PUBLIC_URL, else the default. Raises Malformed."""
    name, url = _given("ECHO2_URL", "ECHO2_PUBLIC_URL")
    if not url:
        return "http://127.0.0.1:8080"
    try:
        return str(httpx.URL(http_url(url))).rstrip("/")
    except (ValueError, httpx.InvalidURL) as error:
        why = error if isinstance(error, ValueError) else "is not a URL"
        raise Malformed(f"{name} {why}; expected a URL such as http://127.0.0.1:8080") from error


def api_key() -> str:
    """The caller's key: ECHO2_API_KEY, else ECHO2_ADMIN_KEY. Raises Unauthorized."""
    name, key = _given("ECHO2_API_KEY", "ECHO2_ADMIN_KEY")
    if not key:
        raise Unauthorized("set ECHO2_API_KEY to an API key of the service")
    if not re.fullmatch(r"[!-~]+", key):
        raise Unauthorized(f"{name} has a space, a line break or a letter outside ASCII: no key has one")
    return key


def client(url: str | None = None, key: str | None = None) -> httpx.Client:
    """An HTTP client with the key in its header. Raises Malformed, Unauthorized for variables that can't be used."""
    base_url = url or address()
    return httpx.Client(
        base_url=base_url,
        headers={"Authorization": f"Bearer {key or api_key()}"},
        timeout=TIMEOUT,
        trust_env=urlsplit(base_url).hostname not in LOOPBACK,
    )


def unwrap(response: httpx.Response, *, text: bool = False) -> Any:
    """The body of a good answer. Raises Problem otherwise, Unavailable for one that no Echo2 gives."""
    if response.is_success:
        if text:
            if not response.headers.get("content-type", "").startswith("text/plain"):
                raise _stranger(response)
            return response.text
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise _stranger(response) from error
    try:
        body = response.json()
    except ValueError:
        body = {}
    otherwise = f"HTTP {response.status_code}"
    if response.is_redirect:
        otherwise += f" leads to {response.headers.get('location')}: set ECHO2_URL to where the service itself is"
    raise Problem(body if isinstance(body, dict) else {}, response.status_code, otherwise)


def _stranger(response: httpx.Response) -> Unavailable:
    return Unavailable(f"what answers at {response.url} is no Echo2; set ECHO2_URL to where the service is")


def call(
    method: str,
    path: str,
    body: Any = None,
    *,
    text: bool = False,
    params: Mapping[str, Any] | None = None,
    patience_s: float | None = None,
) -> Any:
    """One call; `body` is JSON as bytes, or what becomes JSON. Raises Problem, or Unavailable when nobody answers."""
    headers = {"Accept": "text/plain" if text else "application/json"}
    sent: dict[str, Any] = {"json": body}
    if isinstance(body, bytes):
        headers["Content-Type"], sent = "application/json", {"content": body}
    timeout = TIMEOUT if patience_s is None else httpx.Timeout(patience_s, connect=TIMEOUT.connect)
    try:
        with client() as http:
            answer = http.request(method, path, params=params, headers=headers, timeout=timeout, **sent)
            return unwrap(answer, text=text)
    except httpx.TransportError as error:
        raise away(error, address(), changes=method != "GET") from error


def away(error: httpx.TransportError, where: str, *, changes: bool = False) -> Unavailable:
    """No answer, in words. `changes`: the call may have done what it was for all the same."""
    if not changes or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unavailable(f"no answer from {where}: {error}; is `echo2 serve` running?")
    return Unavailable(
        f"no answer from {where}: {error}; what was asked for may happen all the same: look before you repeat it"
    )
