"""What a node takes from the object store, over URLs that the control service presigns.

Invariant: the store gets no token of ours. What it lacks, what it answers too late and what it cuts off raise Lost; an
object longer than it should be raises IntegrityError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import httpx

from app.protocol.errors import EchoError, IntegrityError
from app.protocol.node import SnapshotUrls
from app.snapshots.connection import Lost
from app.snapshots.frames import LeafParser
from app.snapshots.manifest import Manifest
from app.snapshots.plan import Offer, cheapest
from app.snapshots.sources import Announced, FetchUrls
from app.snapshots.web import Web, expect

URLS_TIMEOUT_S = 30.0
CHUNKS_AT_ONCE = 4
"""Chunks whose URLs are asked for in one go: few enough that presigned URLs don't expire before their turn."""


class Stored:
    """The store's side of a download. `answer_s`: so long a whole document may take."""

    def __init__(self, web: Web, fetch_urls: FetchUrls, *, answer_s: float) -> None:
        self._web = web
        self._fetch_urls = fetch_urls
        self._answer_s = answer_s

    async def step(self, version: int, after: int, held: Sequence[int]) -> Announced:
        """The next step to a version out of the object store, for one who has `held` and is at `after`."""
        urls = await self._urls(version, 0, 1)
        parts = [Offer(p.version, p.base, p.bytes) for p in urls.parts] or [Offer(version, None, 0)]
        plan = cheapest(
            version,
            held=held,
            wholes={p.version: p.bytes for p in parts if p.base is None and p.version > after},
            deltas=[p for p in parts if p.base is not None],
        )
        if plan is None or not plan.steps or plan.steps[0].version <= after:
            raise Lost(f"the store has no way to version {version} from {list(held) or 'nothing'}")
        step = plan.steps[0]
        if step.version != version:
            urls = await self._urls(step.version, 0, 1)
        if step.base is None:
            return Announced(await self._object(urls.manifest_url))
        if urls.delta is None:
            raise Lost(f"no URLs for the delta of version {step.version}")
        return Announced(await self._object(urls.delta.version_url), delta=await self._object(urls.delta.manifest_url))

    async def leaves(self, manifest: Manifest, first: int) -> AsyncGenerator[tuple[int, bytes | memoryview]]:
        """Leaves from `first` on out of the store's chunks, not yet verified."""
        urls: dict[int, str] = {}
        for chunk in range(first // manifest.leaves_per_chunk, manifest.chunks):
            if chunk not in urls:
                count = min(CHUNKS_AT_ONCE, manifest.chunks - chunk)
                given = await self._urls(manifest.version, chunk, count)
                urls = given.chunk_urls if manifest.whole else given.delta.chunk_urls if given.delta else {}
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
        async with self._web.get(url, {"Range": f"bytes={skip}-"} if skip else {}) as response:
            if response.status_code == 206:
                skip = 0
            else:
                expect(response.status_code, 200)  # a store that doesn't know ranges: read over the beginning
            async for data in response.aiter_raw():
                part, skip = data[skip:], max(0, skip - len(data))
                for n, leaf in parser.feed(part):
                    if n >= end:
                        raise IntegrityError(f"chunk {chunk} is longer than it should be")
                    yield n, leaf
                    begin = n + 1
        if begin < end:
            raise Lost(f"chunk {chunk} ended before leaf {begin}")

    async def _object(self, url: str) -> bytes:
        """A signed document in the store."""
        try:
            async with asyncio.timeout(self._answer_s), self._web.get(url, {}) as response:
                expect(response.status_code, 200)
                return await self._web.document(response)
        except TimeoutError as error:
            raise Lost(f"no whole manifest within {self._answer_s:g} s") from error

    async def _urls(self, version: int, first: int, count: int) -> SnapshotUrls:
        try:
            async with asyncio.timeout(URLS_TIMEOUT_S):
                urls = await self._fetch_urls(version, first, count)
        except (EchoError, httpx.HTTPError, TimeoutError) as error:
            raise Lost(f"no URLs for version {version}: {error or type(error).__name__}") from error
        if urls.version != version:
            raise Lost(f"URLs of version {urls.version} instead of {version}")
        return urls
