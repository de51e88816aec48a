"""Requests over the general HTTP client: to the object store, and to relays behind TLS or a proxy.

Invariant: silence longer than `stall_s` and every fault of HTTP raise Lost; a document is bounded in size. Redirects
are not followed, and the caller's headers go to the address that the caller named only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

from app.protocol.errors import IntegrityError
from app.snapshots.connection import CONNECT_S, Lost
from app.snapshots.frames import LeafParser
from app.snapshots.manifest import MAX_DOCUMENT_BYTES, Manifest


class Web:
    """The client's requests. `stall_s`: silence after which the other side counts as dead."""

    def __init__(self, client: httpx.AsyncClient, *, stall_s: float) -> None:
        self._client = client
        self._stall_s = stall_s

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str], *, silence_s: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """An answer whose body is yet to be read; its head may take `silence_s` instead of the usual."""
        read_s = self._stall_s if silence_s is None else silence_s
        timeout = httpx.Timeout(connect=CONNECT_S, read=read_s, write=self._stall_s, pool=self._stall_s)
        headers = {"Accept-Encoding": "identity", **headers}
        try:
            async with self._client.stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=False
            ) as response:
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Lost(f"{type(error).__name__}: {error}"[:300]) from error

    async def document(self, response: httpx.Response) -> bytes:
        """A signed document. IntegrityError when it is too long."""
        document = bytearray()
        try:
            async with asyncio.timeout(self._stall_s) as limit:
                async for data in response.aiter_raw():
                    document += data
                    if len(document) > MAX_DOCUMENT_BYTES:
                        raise IntegrityError(f"the manifest is longer than {MAX_DOCUMENT_BYTES} bytes")
                    limit.reschedule(asyncio.get_running_loop().time() + self._stall_s)
        except TimeoutError as error:
            raise Lost(f"silent for {self._stall_s:g} s within the manifest") from error
        return bytes(document)

    async def leaves(
        self, url: str, headers: Mapping[str, str], manifest: Manifest, first: int
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Leaves from `first` on out of a relay's frames, not yet verified."""
        parser = LeafParser(manifest, first, framed=True)
        async with self.get(url, headers) as response:
            expect(response.status_code, 200)
            async for data in response.aiter_raw():
                for n, leaf in parser.feed(data):
                    yield n, leaf
                    first = n + 1
        if first < manifest.leaves:
            raise Lost(f"the stream ended before leaf {first} of {manifest.leaves}")


def expect(status: int, due: int) -> None:
    """Raises Lost for any other status."""
    if status != due:
        raise Lost(f"answered {status}")
