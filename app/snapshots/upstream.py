"""What a node says to one source over HTTP: a relay (learner or peer) or the object store.

Invariant: everything read is bounded in size and time. A source that is dead, silent or has not got the version raises
Lost; one that sends what can't be right raises IntegrityError. The relay token goes to relays only. A connection is
either kept here, or on its way to the caller inside an Announced, or closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from urllib.parse import urlsplit

import httpx

from app.protocol.errors import IntegrityError
from app.snapshots.connection import Connection, Ended, Lost, direct
from app.snapshots.frames import HEADER, KEEP_ALIVE, PADDING_BYTES, announces_leaf
from app.snapshots.headers import BASES, DELTA_SIZE, DOCUMENT_SIZE, FOLLOW, MAX_BASES
from app.snapshots.manifest import MAX_DOCUMENT_BYTES, Manifest
from app.snapshots.sources import Announced, FetchUrls, Source
from app.snapshots.stored import Stored
from app.snapshots.web import Web, expect

LEAVES_A_TURN = 8
"""Read at most before the rest of the process has its turn."""
KEPT_CONNECTIONS = 4


class Wire:
    """The requests. `stall_s`: silence after which a source counts as dead. `answer_s`: time after which it does though
    something comes, when a whole announcement (beyond the wait asked for) or document is due.
    """

    def __init__(
        self, client: httpx.AsyncClient, *, token: str, stall_s: float, answer_s: float, fetch_urls: FetchUrls
    ) -> None:
        self._web = Web(client, stall_s=stall_s)
        self.store = Stored(self._web, fetch_urls, answer_s=answer_s)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._stall_s = stall_s
        self._answer_s = answer_s
        self._kept: dict[str, Connection] = {}

    async def poll(self, source: Source, after: int, wait_s: float, held: Sequence[int] = ()) -> Announced | None:
        """A relay's next step to a version > `after`; None when it has none within `wait_s`.

        `held`: complete versions here, from which a delta may lead.
        """
        bases = {BASES: ",".join(map(str, held[:MAX_BASES]))} if held else {}
        path, silence_s = f"/snapshots/next?after={after}&wait_s={wait_s:g}", wait_s + self._stall_s
        ask = self._poll_directly if direct(source.url) else self._poll_over_web
        try:
            async with asyncio.timeout(wait_s + self._answer_s):
                return await ask(source, path, bases, silence_s)
        except TimeoutError as error:
            raise Lost(f"no whole announcement within {wait_s + self._answer_s:g} s") from error

    async def _poll_over_web(
        self, source: Source, path: str, bases: dict[str, str], silence_s: float
    ) -> Announced | None:
        url = source.url.rstrip("/") + path
        async with self._web.get(url, self._headers | bases, silence_s=silence_s) as response:
            if response.status_code == 204:
                return None
            expect(response.status_code, 200)
            document, delta = _split(await self._web.document(response), response.headers.get(DELTA_SIZE))
            return Announced(document, None, delta)

    async def _poll_directly(
        self, source: Source, path: str, bases: dict[str, str], silence_s: float
    ) -> Announced | None:
        connection = await self._ask(source, path, {FOLLOW: "1", **bases}, silence_s)
        following = False
        try:
            if connection.status == 204:
                return None
            expect(connection.status, 200)
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
        what = "stream" if manifest.whole else "delta"
        path = f"/snapshots/{manifest.version}/{what}?from_leaf={first}" + (f"&leaves={count}" if count else "")
        if stream is None and not direct(source.url):
            async with aclosing(
                self._web.leaves(source.url.rstrip("/") + path, self._headers, manifest, first)
            ) as leaves:
                async for received in leaves:
                    yield received
            return
        connection = stream or await self._ask(source, path, {}, self._stall_s)
        try:
            if stream is None:
                expect(connection.status, 200)
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
            leaves = self.store.leaves(manifest, n)
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
        too_long = f"the manifest is longer than {MAX_DOCUMENT_BYTES} bytes"
        if size is not None and due > MAX_DOCUMENT_BYTES:
            # Before it is read: ten digits are more than there is memory.
            raise IntegrityError(too_long)
        document = bytearray()
        while len(document) < due:
            piece = bytearray(min(64 * 1024, due - len(document)))
            got = await connection.read(memoryview(piece), self._stall_s)
            document += memoryview(piece)[:got]
            if got < len(piece):
                break
        if len(document) > MAX_DOCUMENT_BYTES:
            raise IntegrityError(too_long)
        if size is not None and len(document) < due:
            raise Lost("the manifest is cut off")
        return bytes(document)


def _split(documents: bytes, delta_size: str | None) -> tuple[bytes, bytes]:
    """The document of a version, and that of a delta if the answer's header says how long it is."""
    if delta_size is None:
        return documents, b""
    size = int(delta_size) if delta_size.isascii() and delta_size.isdigit() and len(delta_size) <= 10 else 0
    if not 0 < size < len(documents):
        raise IntegrityError(f"a delta's document of {delta_size[:20]!r} bytes")
    return documents[:-size], documents[-size:]
