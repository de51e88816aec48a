"""Where files come from, and redirects, for servers that answer with the address of another one.

Invariant: nothing is asked for without TLS because a server said so, unless that server and the other one are both on
this machine's loopback; no address of a redirect, which may be signed, gets into a message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx

from app.protocol.errors import Forbidden, Unavailable


@dataclass(frozen=True, slots=True)
class Origin:
    """Who a file comes from: what errors call it, how long it may be silent, how often a call that comes no further is
    repeated, how many redirects are followed."""

    name: str
    timeout: httpx.Timeout
    retries: int
    hops: int = 0


def may_go(start: httpx.URL, to: httpx.URL) -> bool:
    """Whether a redirect of a request that began at `start` may be followed."""
    if to.scheme == "https":
        return True
    return to.scheme == "http" and _loopback(start.host) and _loopback(to.host)


@asynccontextmanager
async def follow(
    http: httpx.AsyncClient, url: str, headers: dict[str, str], origin: Origin
) -> AsyncIterator[httpx.Response]:
    """The streamed answer to a GET, after redirects if the origin may have any; else they are answers like any other.

    Raises Forbidden for a redirect that may not be followed, Unavailable for too many, and what httpx raises.
    """
    start = here = httpx.URL(url)
    left = origin.hops
    async with AsyncExitStack() as stack:
        while True:
            response = await stack.enter_async_context(
                http.stream("GET", here, timeout=origin.timeout, headers=headers)
            )
            if response.next_request is None or not origin.hops:
                break
            here = response.next_request.url
            await response.aclose()
            if not left:
                raise Unavailable(f"more than {origin.hops} redirects")
            left -= 1
            if not may_go(start, here):
                raise Forbidden(f"a redirect to {here.scheme[:10]!r} is not followed: only https is")
        yield response


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
