"""HTTP requests to addresses that users name, without a way into the network that we stand in.

Invariant: unless private addresses are allowed, a connection goes only to a global unicast address, and to the very
one that was checked: the name is resolved once, and a redirect is an answer like any other.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import httpx

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) → its addresses as text. Raises OSError if there are none."""

CONNECT_S = 5.0
ANSWER_S = 15.0
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Forbidden(Exception):
    """The address must not be asked; the message says why, without the URL's path and query."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, by the system's resolver."""
    async with asyncio.timeout(CONNECT_S):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def url_problem(url: str, *, allow_private: bool) -> str:
    """What is wrong with a URL as far as its text tells; empty if nothing is."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return "is not a URL: its host or port can't be read"
    if parts.scheme not in ("http", "https") or not host:
        return "must be a URL that begins with https:// or http:// and names a host"
    if parts.username is not None or parts.password is not None:
        return "must not hold a user or password"
    if port == 0 or any(c <= " " or c == "\x7f" for c in url):
        return "has a port or a character that no request can carry"
    if allow_private:
        return ""
    address = _literal(host)
    local = host == "localhost" or host.endswith(".localhost")
    if local or (address is not None and not public(address)):
        return "names an address of a private network; this service sends to public ones (ECHO2_NOTIFY_ALLOW_PRIVATE)"
    return ""


def public(address: IPAddress) -> bool:
    """Whether it is a global unicast address; one that wraps an IPv4 address is as good as what it wraps."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def _literal(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class Outward:
    """Posts to addresses that users name."""

    def __init__(
        self,
        *,
        allow_private: bool,
        resolver: Resolve = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._resolve = resolver
        alone = httpx.Limits(max_keepalive_connections=0)
        # No proxy of the environment, no cookies kept, no connection kept: nothing of one job reaches another.
        self._client = httpx.AsyncClient(
            transport=transport or httpx.AsyncHTTPTransport(retries=0, limits=alone),
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            follow_redirects=False,
            trust_env=False,
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """Status of the answer; its body is not read. Raises Forbidden, httpx.HTTPError, OSError, TimeoutError."""
        problem = url_problem(url, allow_private=self._allow_private)
        if problem:
            raise Forbidden(f"the address {problem}")
        parts = urlsplit(url)
        host = parts.hostname or ""
        pinned = await self._pin(host, parts.port or (443 if parts.scheme == "https" else 80))
        target = httpx.URL(url).copy_with(host=pinned)
        named = {**headers, "Host": httpx.URL(url).netloc.decode("ascii")}
        request = self._client.build_request(
            "POST", target, content=body, headers=named, extensions={"sni_hostname": host}
        )
        async with asyncio.timeout(ANSWER_S):
            answer = await self._client.send(request, stream=True)
            await answer.aclose()
        return answer.status_code

    async def _pin(self, host: str, port: int) -> str:
        """The address to connect to. Raises Forbidden if the name leads anywhere that is not public."""
        address = _literal(host)
        found = [str(address)] if address is not None else await self._resolve(host, port)
        if not found:
            raise OSError("the name has no address")
        if not self._allow_private and not all(public(ipaddress.ip_address(a.partition("%")[0])) for a in found):
            raise Forbidden("the address leads into a private network")
        return found[0]

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()
