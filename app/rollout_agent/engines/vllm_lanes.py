"""Many requests to one server side by side, each over a connection that it has for itself.

httpx's own pool goes through all its connections at the begin and at the end of every request, and asks the kernel
about each idle one: with 80 samples in flight that took ten times as long as all else that a request needs, and a core
was full at a hundred requests a second.

Invariant: a connection serves one request at a time; it is free again once the answer is read or closed. One whose
request failed or was cancelled is never used again: if that was before it was open, httpcore may count it as taken for
ever.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from typing import cast

import httpx

KEEPALIVE_S = 2.0
"""An idle connection is not used again after that: the server may end it, just as a request is sent."""


class Lanes(httpx.AsyncBaseTransport):
    """As many connections as there were ever requests at a time; the one that was free last is taken first.

    `make` makes a transport for one connection.
    """

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport] | None = None) -> None:
        context = ssl.create_default_context()
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)
        self._make = make or (lambda: httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits))
        self._all: set[httpx.AsyncBaseTransport] = set()
        self._free: list[httpx.AsyncBaseTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As of any transport."""
        lane = self._free.pop() if self._free else self._further()
        good = False
        try:
            answer = await lane.handle_async_request(request)
            good = True
        finally:
            if not good:
                await self._give_up(lane)
        answer.stream = _Held(cast(httpx.AsyncByteStream, answer.stream), lambda: self._free.append(lane))
        return answer

    def _further(self) -> httpx.AsyncBaseTransport:
        lane = self._make()
        self._all.add(lane)
        return lane

    async def _give_up(self, lane: httpx.AsyncBaseTransport) -> None:
        self._all.discard(lane)
        await lane.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        for lane in tuple(self._all):
            await lane.aclose()


class _Held(httpx.AsyncByteStream):
    """The body of an answer; `release` is called once, when it is closed as it should be."""

    def __init__(self, stream: httpx.AsyncByteStream, release: Callable[[], None]) -> None:
        self._stream = stream
        self._release = release
        self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        await self._stream.aclose()
        if not self._closed:
            self._closed = True
            self._release()
