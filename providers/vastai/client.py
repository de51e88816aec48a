"""One HTTP exchange with vast.ai.

Invariant: one call sends one request; there is no retry and no redirect here. What can't be read raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from providers.base import MalformedAnswer, ProviderError, RateLimited, Transient

from .errors import classify, parse_object, redact
from .limiter import Intervals

TIMEOUT = httpx.Timeout(connect=10.0, read=30.0, write=30.0, pool=10.0)
# Shorter than servers keep idle connections, so that a create is seldom sent into one that is just being closed.
LIMITS = httpx.Limits(max_connections=8, max_keepalive_connections=4, keepalive_expiry=2.0)
WHOLE_S = 120.0
"""For a whole exchange: the timeouts above begin anew with every byte that comes."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
"""Failures that come before the first byte of a request."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")

OnRequest = Callable[[str, str, str], None]

VEIL_FROM = 16
"""A shorter key can be part of honest text, a label for one: real keys are longer."""


class Http:
    """Sends requests with the key, in line with the intervals, and reports each outcome."""

    def __init__(
        self, name: str, base_url: str, api_key: str, transport: httpx.AsyncBaseTransport | None,
        intervals: Intervals, now: Callable[[], float], on_request: OnRequest | None,
    ) -> None:  # fmt: skip
        self._name = name
        self._key = api_key
        self._intervals = intervals
        self._now = now
        self._on_request = on_request
        self.client = httpx.AsyncClient(
            base_url=base_url, timeout=TIMEOUT, limits=LIMITS, transport=transport, follow_redirects=False,
            # A proxy of the environment must not see calls to this computer itself.
            trust_env=urlsplit(base_url).hostname not in LOOPBACK,
        )  # fmt: skip

    def report(self, call: str, outcome: str) -> None:
        """Tell the metrics hook."""
        if self._on_request is not None:
            self._on_request(self._name, call, outcome)

    async def send(
        self, call: str, method: str, path: str, *,
        body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None,
    ) -> httpx.Response:  # fmt: skip
        """One request; raises httpx.TransportError, or RateLimited unsent while a 429 keeps the call away for long."""
        if held := self._intervals.held_s(call):
            raise RateLimited(f"{call}: {self._name} said to wait", wait_s=held, provider=self._name)
        await self._intervals.wait(call)
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json"}
        try:
            async with asyncio.timeout(WHOLE_S):
                answer = await self.client.request(method, path, json=body, params=params, headers=headers)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole answer within {WHOLE_S:.0f} s") from error
        return self._veiled(answer)

    def _veiled(self, response: httpx.Response) -> httpx.Response:
        """The answer without our key, should it repeat it: what it says ends in errors, logs and events."""
        if len(self._key) < VEIL_FROM or self._key not in response.text:
            return response
        text, status = response.text.replace(self._key, "…"), response.status_code
        return httpx.Response(status, text=text, request=response.request)

    def error(self, call: str, response: httpx.Response) -> ProviderError:
        """The typed error of a refusal; a 429 holds the next call of its kind back."""
        headers = {key.lower(): value for key, value in response.headers.items()}
        found = classify(call, response.status_code, headers, response.text, now=self._now(), provider=self._name)
        if isinstance(found, RateLimited):
            self._intervals.penalise(call, found.wait_s)
        return found

    async def json(
        self, call: str, method: str, path: str, *,
        body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """One exchange whose answer must be a JSON object that does not say success: false."""
        try:
            answer = await self._read(call, await self.send(call, method, path, body=body, params=params))
        except httpx.HTTPError as error:
            self.report(call, Transient.code)
            raise Transient(f"{call}: {type(error).__name__} {error}", provider=self._name) from error
        except ProviderError as error:
            self.report(call, error.code)
            raise
        self.report(call, "ok")
        return answer

    async def _read(self, call: str, response: httpx.Response) -> dict[str, Any]:
        if not response.is_success:
            raise self.error(call, response)
        answer = parse_object(response.text)
        if answer is None:
            raise MalformedAnswer(f"{call}: not a JSON object", provider=self._name, raw=redact(response.text))
        if answer.get("success") is False:
            raise self.error(call, response)
        return answer
