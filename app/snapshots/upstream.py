"""What a node says to one source over HTTP: a relay (learner or peer) or the object store.

Invariant: everything read is bounded in size and time. A source that is dead, silent or has not got the version raises
Lost; one that sends what can't be right raises IntegrityError. The relay token goes to relays only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import httpx

from app.protocol.errors import EchoError, IntegrityError
from app.protocol.node import SnapshotUrls
from app.snapshots.frames import LeafParser
from app.snapshots.manifest import MAX_DOCUMENT_BYTES, Manifest

CONNECT_S = 5.0
URLS_TIMEOUT_S = 30.0
CHUNKS_AT_ONCE = 4
"""Chunks whose URLs are asked for in one go: few enough that presigned URLs don't expire before their turn."""

FetchUrls = Callable[[int, int, int], Awaitable[SnapshotUrls]]
"""(version, first chunk, count) → presigned URLs. May raise EchoError, httpx.HTTPError, TimeoutError."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where to pull from: base URL of a relay, empty for the object store."""

    kind: Literal["learner", "peer", "store"]
    url: str = ""
    node_id: str = ""

    @property
    def label(self) -> str:
        """For logs: the node's id, or `learner`, `store`."""
        return self.node_id or self.kind


class Lost(Exception):
    """The source is dead, silent, or hasn't got what was asked for; another may."""


class Wire:
    """The requests. `stall_s`: silence after which a source counts as dead."""

    def __init__(self, client: httpx.AsyncClient, *, token: str, stall_s: float, fetch_urls: FetchUrls) -> None:
        self._client = client
        self._headers = {"Authorization": f"Bearer {token}"}
        self._stall_s = stall_s
        self._fetch_urls = fetch_urls

    async def poll(self, source: Source, after: int, wait_s: float) -> bytes | None:
        """A relay's newest signed document with version > `after`; None when it has none within `wait_s`."""
        url = f"{source.url.rstrip('/')}/snapshots/next?after={after}&wait_s={wait_s:g}"
        async with self._get(url, self._headers, silence_s=wait_s + self._stall_s) as response:
            if response.status_code == 204:
                return None
            _expect(response, 200)
            return await self._document(response)

    async def relay_leaves(self, source: Source, manifest: Manifest, first: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Leaves from `first` on as a relay sends them, not yet verified."""
        url = f"{source.url.rstrip('/')}/snapshots/{manifest.version}/stream?from_leaf={first}"
        parser = LeafParser(manifest, first, framed=True)
        done = first
        async with self._get(url, self._headers) as response:
            _expect(response, 200)
            async for data in response.aiter_raw():
                for n, leaf in parser.feed(data):
                    yield n, leaf
                    done = n + 1
        if done < manifest.leaves:
            raise Lost(f"the stream ended before leaf {done} of {manifest.leaves}")

    async def stored_document(self, version: int) -> bytes:
        """The signed document of a version in the object store."""
        urls = await self._urls(version, 0, 1)
        async with self._get(urls.manifest_url, {}) as response:
            _expect(response, 200)
            return await self._document(response)

    async def stored_leaves(self, manifest: Manifest, first: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Leaves from `first` on out of the store's chunks, not yet verified."""
        urls: dict[int, str] = {}
        for chunk in range(first // manifest.leaves_per_chunk, manifest.chunks):
            if chunk not in urls:
                count = min(CHUNKS_AT_ONCE, manifest.chunks - chunk)
                urls = (await self._urls(manifest.version, chunk, count)).chunk_urls
                if chunk not in urls:
                    raise Lost(f"no URL for chunk {chunk} of version {manifest.version}")
            begin = max(first, chunk * manifest.leaves_per_chunk)
            async with aclosing(self._chunk(urls[chunk], manifest, chunk, begin)) as leaves:
                async for leaf in leaves:
                    yield leaf

    async def _chunk(self, url: str, manifest: Manifest, chunk: int, begin: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Leaves `begin` … end of one chunk object."""
        end = min((chunk + 1) * manifest.leaves_per_chunk, manifest.leaves)
        skip = (begin - chunk * manifest.leaves_per_chunk) * manifest.leaf_bytes
        parser = LeafParser(manifest, begin, framed=False)
        async with self._get(url, {"Range": f"bytes={skip}-"} if skip else {}) as response:
            if response.status_code == 206:
                skip = 0
            else:
                _expect(response, 200)  # a store that doesn't know ranges: read over the beginning
            async for data in response.aiter_raw():
                part, skip = data[skip:], max(0, skip - len(data))
                for n, leaf in parser.feed(part):
                    if n >= end:
                        raise IntegrityError(f"chunk {chunk} is longer than it should be")
                    yield n, leaf
                    begin = n + 1
        if begin < end:
            raise Lost(f"chunk {chunk} ended before leaf {begin}")

    async def _urls(self, version: int, first: int, count: int) -> SnapshotUrls:
        try:
            async with asyncio.timeout(URLS_TIMEOUT_S):
                urls = await self._fetch_urls(version, first, count)
        except (EchoError, httpx.HTTPError, TimeoutError) as error:
            raise Lost(f"no URLs for version {version}: {error or type(error).__name__}") from error
        if urls.version != version:
            raise Lost(f"URLs of version {urls.version} instead of {version}")
        return urls

    async def _document(self, response: httpx.Response) -> bytes:
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

    @asynccontextmanager
    async def _get(
        self, url: str, headers: dict[str, str], *, silence_s: float = math.nan
    ) -> AsyncIterator[httpx.Response]:
        silence_s = self._stall_s if math.isnan(silence_s) else silence_s
        timeout = httpx.Timeout(connect=CONNECT_S, read=silence_s, write=self._stall_s, pool=self._stall_s)
        headers = {"Accept-Encoding": "identity", **headers}
        try:
            async with self._client.stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=False
            ) as response:
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Lost(f"{type(error).__name__}: {error}"[:300]) from error


def _expect(response: httpx.Response, status: int) -> None:
    if response.status_code != status:
        raise Lost(f"answered {response.status_code}")
