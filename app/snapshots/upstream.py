"""What a node says to one source over HTTP: a relay (learner or peer) or the object store.

Invariant: everything read is bounded in size and time. A source that is dead, silent or has not got the version raises
Lost; one that sends what can't be right raises IntegrityError. The relay token goes to relays only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import httpx

from app.protocol.errors import EchoError, IntegrityError
from app.protocol.node import SnapshotUrls
from app.snapshots.connection import CONNECT_S, Connection, Ended, Lost, direct
from app.snapshots.frames import HEADER, KEEP_ALIVE, PADDING_BYTES, LeafParser, announces_leaf
from app.snapshots.manifest import MAX_DOCUMENT_BYTES, Manifest
from app.snapshots.plan import Offer, cheapest

URLS_TIMEOUT_S = 30.0
CHUNKS_AT_ONCE = 4
"""Chunks whose URLs are asked for in one go: few enough that presigned URLs don't expire before their turn."""

LEAVES_A_TURN = 8
"""Read at most before the rest of the process has its turn."""
KEPT_CONNECTIONS = 4
FOLLOW = "Echo2-Follow"
"""Request header of an announcement: `1` asks for the leaves to follow the document."""
DOCUMENT_SIZE = "Echo2-Document"
"""Answer header: they do, after so many bytes of document."""
BASES = "Echo2-Bases"
"""Request header of an announcement: versions that the asker has complete, so that a delta from one of them will do."""
MAX_BASES = 16
DELTA_SIZE = "Echo2-Delta"
"""Answer header: the last so many bytes of the document are the signed document of a delta that leads there."""

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


@dataclass(frozen=True, slots=True)
class Announced:
    """A signed document, and the connection on which the version's leaves follow, if the relay sends them at once."""

    document: bytes
    stream: Connection | None = None
    delta: bytes = b""
    """The document of the delta that is offered instead of the whole version."""

    def close(self) -> None:
        """Do without the leaves that follow."""
        if self.stream is not None:
            self.stream.close()


class Wire:
    """The requests. `stall_s`: silence after which a source counts as dead."""

    def __init__(self, client: httpx.AsyncClient, *, token: str, stall_s: float, fetch_urls: FetchUrls) -> None:
        self._client = client
        self._headers = {"Authorization": f"Bearer {token}"}
        self._stall_s = stall_s
        self._fetch_urls = fetch_urls
        self._kept: dict[str, Connection] = {}

    async def poll(self, source: Source, after: int, wait_s: float, held: Sequence[int] = ()) -> Announced | None:
        """A relay's next step to a version > `after`; None when it has none within `wait_s`.

        `held`: complete versions here, from which a delta may lead.
        """
        bases = {BASES: ",".join(map(str, held[:MAX_BASES]))} if held else {}
        path, silence_s = f"/snapshots/next?after={after}&wait_s={wait_s:g}", wait_s + self._stall_s
        if not direct(source.url):
            headers = self._headers | bases
            async with self._get(source.url.rstrip("/") + path, headers, silence_s=silence_s) as response:
                if response.status_code == 204:
                    return None
                _expect(response.status_code, 200)
                document, delta = _split(await self._document(response), response.headers.get(DELTA_SIZE))
                return Announced(document, None, delta)
        connection = await self._ask(source, path, {FOLLOW: "1", **bases}, silence_s)
        following = False
        try:
            if connection.status == 204:
                return None
            _expect(connection.status, 200)
            size = connection.headers.get(DOCUMENT_SIZE.lower())
            document, delta = _split(
                await self._read_document(connection, size), connection.headers.get(DELTA_SIZE.lower())
            )
            following = size is not None
        except BaseException:
            # Cancelled too, nobody else knows this connection: it is closed, and the error goes on.
            connection.close()
            raise
        finally:
            if not following:
                self._keep(source, connection)
        return Announced(document, connection if following else None, delta)

    async def relay_leaves(
        self,
        source: Source,
        manifest: Manifest,
        first: int,
        stream: Connection | None = None,
        *,
        count: int | None = None,
    ) -> AsyncGenerator[tuple[int, bytes | memoryview]]:
        """Leaves from `first` on as a relay sends them, not yet verified. A leaf is valid until the next is asked for.

        `stream`: where they come already; otherwise they are asked for, all or `count` of them. A relay that doesn't
        know the count sends all.
        """
        what = "stream" if manifest.kind == "full" else "delta"
        path = f"/snapshots/{manifest.version}/{what}?from_leaf={first}" + (f"&leaves={count}" if count else "")
        if stream is None and not direct(source.url):
            async with aclosing(self._http_leaves(source.url.rstrip("/") + path, manifest, first)) as leaves:
                async for received in leaves:
                    yield received
            return
        connection = stream or await self._ask(source, path, {}, self._stall_s)
        try:
            if stream is None:
                _expect(connection.status, 200)
            async with aclosing(self._frames(connection, manifest, first)) as leaves:
                async for n, leaf in leaves:
                    first = n + 1
                    yield n, leaf
        finally:
            self._keep(source, connection)
        if first < manifest.leaves:
            raise Lost(f"the stream ended before leaf {first} of {manifest.leaves}")

    async def one_leaf(self, source: Source, manifest: Manifest, n: int) -> bytes:
        """Leaf n from any source, not yet verified. Lost or IntegrityError."""
        if source.kind == "store":
            leaves = self.stored_leaves(manifest, n)
        else:
            leaves = self.relay_leaves(source, manifest, n, count=1)
        async with aclosing(leaves) as arriving:
            async for _, leaf in arriving:
                return bytes(leaf)
        raise Lost(f"no leaf {n} came")

    async def _frames(
        self, connection: Connection, manifest: Manifest, first: int
    ) -> AsyncGenerator[tuple[int, memoryview]]:
        """The leaves in an answer's frames, to its end. The header behind a leaf is read with it, if it is there."""
        size = manifest.leaf_size(0)
        buffer = memoryview(bytearray(size + HEADER.size))
        head, got = bytearray(HEADER.size), 0
        while first < manifest.leaves:
            got += await connection.read(memoryview(head)[got:], self._stall_s)
            if got < HEADER.size:
                return
            got = 0
            if announces_leaf(manifest, first, bytes(head)):
                size = manifest.leaf_size(first)
                received = await connection.read_some(buffer[: size + HEADER.size], size, self._stall_s)
                if received < size:
                    return
                got = received - size
                head[:got] = buffer[size:received]
                first += 1
                yield first - 1, buffer[:size]
                if first % LEAVES_A_TURN == 0:
                    await asyncio.sleep(0)  # while there is more to read, the relay would not have its turn
        await self._padding(connection, bytes(head[:got]))

    async def _padding(self, connection: Connection, rest: bytes) -> None:
        """Read an answer to its end, so that the connection can be kept: nothing but keep-alives may come."""
        piece = memoryview(bytearray(PADDING_BYTES))
        while True:
            got = await connection.read(piece, self._stall_s)
            rest += piece[:got]
            if not (KEEP_ALIVE * (len(rest) // HEADER.size + 1)).startswith(rest):
                raise IntegrityError("bytes after the last leaf")
            if got < len(piece):
                return
            rest = rest[len(rest) - len(rest) % HEADER.size :]

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._kept:
            self._kept.popitem()[1].close()

    async def _ask(self, source: Source, path: str, headers: dict[str, str], silence_s: float) -> Connection:
        """A connection on which the answer to a request has begun: the one that was kept, or a new one."""
        base = urlsplit(source.url).path.rstrip("/")
        kept = self._kept.pop(source.url, None)
        for connection in (kept, None) if kept is not None else (None,):
            asking = connection or await Connection.open(source.url)
            try:
                await asking.get(base + path, self._headers | headers, silence_s)
                return asking
            except Ended:
                asking.close()
                if asking is not kept:
                    raise
            except BaseException:
                # Cancelled too, nobody else knows this connection: it is closed, and the error goes on.
                asking.close()
                raise
        raise AssertionError("unreachable")

    def _keep(self, source: Source, connection: Connection) -> None:
        """Keep a connection for the next request, if its last answer was read to the end."""
        if not connection.idle:
            connection.close()
            return
        replaced = self._kept.pop(source.url, None)
        self._kept[source.url] = connection
        if replaced is None and len(self._kept) > KEPT_CONNECTIONS:
            replaced = self._kept.pop(next(iter(self._kept)))
        if replaced is not None:
            replaced.close()

    async def _read_document(self, connection: Connection, size: str | None) -> bytes:
        """The document in a relay's answer: all of it, or its first `size` bytes."""
        if size is not None and not (size.isascii() and size.isdigit() and len(size) <= 10):
            raise IntegrityError(f"a document of {size[:20]!r} bytes")
        due = MAX_DOCUMENT_BYTES + 1 if size is None else int(size)
        document = bytearray()
        while len(document) < due:
            piece = bytearray(min(64 * 1024, due - len(document)))
            got = await connection.read(memoryview(piece), self._stall_s)
            document += memoryview(piece)[:got]
            if got < len(piece):
                break
        if len(document) > MAX_DOCUMENT_BYTES:
            raise IntegrityError(f"the manifest is longer than {MAX_DOCUMENT_BYTES} bytes")
        if size is not None and len(document) < due:
            raise Lost("the manifest is cut off")
        return bytes(document)

    async def _http_leaves(
        self, url: str, manifest: Manifest, first: int
    ) -> AsyncGenerator[tuple[int, bytes | memoryview]]:
        """The same over the general client, for relays behind TLS or a proxy."""
        parser = LeafParser(manifest, first, framed=True)
        async with self._get(url, self._headers) as response:
            _expect(response.status_code, 200)
            async for data in response.aiter_raw():
                for n, leaf in parser.feed(data):
                    yield n, leaf
                    first = n + 1
        if first < manifest.leaves:
            raise Lost(f"the stream ended before leaf {first} of {manifest.leaves}")

    async def stored_step(self, version: int, after: int, held: Sequence[int]) -> Announced:
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

    async def _object(self, url: str) -> bytes:
        """A signed document in the store."""
        async with self._get(url, {}) as response:
            _expect(response.status_code, 200)
            return await self._document(response)

    async def stored_leaves(self, manifest: Manifest, first: int) -> AsyncGenerator[tuple[int, bytes | memoryview]]:
        """Leaves from `first` on out of the store's chunks, not yet verified."""
        urls: dict[int, str] = {}
        for chunk in range(first // manifest.leaves_per_chunk, manifest.chunks):
            if chunk not in urls:
                count = min(CHUNKS_AT_ONCE, manifest.chunks - chunk)
                given = await self._urls(manifest.version, chunk, count)
                urls = given.chunk_urls if manifest.kind == "full" else given.delta.chunk_urls if given.delta else {}
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
                _expect(response.status_code, 200)  # a store that doesn't know ranges: read over the beginning
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


def _split(documents: bytes, delta_size: str | None) -> tuple[bytes, bytes]:
    """The document of a version, and that of a delta if the answer's header says how long it is."""
    if delta_size is None:
        return documents, b""
    size = int(delta_size) if delta_size.isascii() and delta_size.isdigit() and len(delta_size) <= 10 else 0
    if not 0 < size < len(documents):
        raise IntegrityError(f"a delta's document of {delta_size[:20]!r} bytes")
    return documents[:-size], documents[-size:]


def _expect(status: int, due: int) -> None:
    if status != due:
        raise Lost(f"answered {status}")
