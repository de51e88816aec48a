"""A wire between an httpx adapter and its emulator that counts, changes and spoils what passes.

Invariant: what no order concerns passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx

Change = Callable[[httpx.Request, httpx.Response], httpx.Response | None]
"""A new answer, or None when this exchange is not meant."""
Rewrite = Callable[[httpx.Request], httpx.Request | None]


class Wire(httpx.AsyncBaseTransport):
    """Passes requests to `inner`. Standing orders are `rewrites` and `changes`; `once` are used up by a match."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner
        self.requests: list[httpx.Request] = []
        self.rewrites: list[Rewrite] = []
        self.changes: list[Change] = []
        self.once: list[Change] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One exchange, orders applied."""
        self.requests.append(request)
        for rewrite in self.rewrites:
            request = rewrite(request) or request
        answer = await self.inner.handle_async_request(request)
        await answer.aread()
        for order in list(self.once):
            try:
                changed = order(request, answer)
            except httpx.TransportError:
                self.once.remove(order)
                raise
            if changed is not None:
                self.once.remove(order)
                return changed
        for change in self.changes:
            answer = change(request, answer) or answer
        return answer

    async def aclose(self) -> None:
        """Close the connections."""
        await self.inner.aclose()


def garble(matches: Callable[[httpx.Request], bool]) -> Change:
    """An order: the next matching answer is a 200 with a page of HTML in place of JSON."""

    def change(request: httpx.Request, _: httpx.Response) -> httpx.Response | None:
        if not matches(request):
            return None
        return httpx.Response(200, text="<html>we are working on it</html>", headers={"content-type": "text/html"})

    return change


def cut(matches: Callable[[httpx.Request], bool]) -> Change:
    """An order: the next matching request does its work, and the connection breaks before the answer is here."""

    def change(request: httpx.Request, _: httpx.Response) -> httpx.Response | None:
        if matches(request):
            raise httpx.ReadError("the connection broke", request=request)
        return None

    return change
