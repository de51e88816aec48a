"""A little broadcast on loopback: stores, relays, pullers, and an upstream that misbehaves on command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from app.protocol.errors import NotFound
from app.protocol.node import DeltaUrls, SnapshotUrls, StoredPart
from app.snapshots import Puller, Relay, Snapshot, SnapshotStore, Source, new_key, public_hex, verify
from app.snapshots.frames import frame
from app.storage.objects import ObjectInfo, PresignedPut

torch.set_num_threads(1)
KEY = new_key()
TOKEN = "relay-token"
LEAF = 1024
DEADLINE_S = 20.0


def make_store(root: Path, **options: Any) -> SnapshotStore:
    return SnapshotStore(root, job_id="j", public_key=public_hex(KEY), leaf_bytes=LEAF, chunk_bytes=LEAF * 4, **options)


def publish(store: SnapshotStore, version: int, elements: int = 8000) -> Snapshot:
    generator = torch.Generator().manual_seed(version)
    return store.publish_full({"w": torch.randn(elements, generator=generator)}, version=version, key=KEY)


def leaf(snapshot: Snapshot, n: int) -> bytes:
    return snapshot.payload_path.read_bytes()[n * LEAF : (n + 1) * LEAF]


@contextlib.asynccontextmanager
async def relay_of(store: SnapshotStore, uplink: float | None = None) -> AsyncIterator[Relay]:
    relay = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=uplink)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


def url(relay: Relay) -> str:
    return f"http://127.0.0.1:{relay.port}"


class Node:
    """A store with a puller on it, and what the puller reported."""

    def __init__(self, root: Path, sources: Sequence[Source], client: httpx.AsyncClient, **options: Any) -> None:
        self.store = make_store(root)
        self.sources = list(sources)
        self.target: int | None = None
        self.installed: list[int] = []
        self.lies: list[tuple[Source, int]] = []
        self.stalls: list[Source] = []
        self.refused: list[tuple[Source, int]] = []
        defaults: dict[str, Any] = {
            "fetch_urls": self._no_urls,
            "on_complete": self._complete,
            "on_lie": self._lie,
            "on_stall": self._stall,
            "on_refused": self._refuse,
            "retry_s": 0.05,
        }
        self.puller = Puller(
            self.store,
            token=TOKEN,
            sources=lambda: self.sources,
            target=lambda: self.target,
            client=client,
            **(defaults | options),
        )

    async def _no_urls(self, version: int, first: int, count: int) -> SnapshotUrls:
        raise NotFound(f"version {version} is not stored")

    async def _complete(self, snapshot: Snapshot) -> None:
        self.installed.append(snapshot.version)
        self.store.changes.notify()

    async def _lie(self, source: Source, version: int, detail: str) -> None:
        self.lies.append((source, version))
        self.store.changes.notify()

    async def _stall(self, source: Source, version: int, detail: str) -> None:
        self.stalls.append(source)

    async def _refuse(self, source: Source, version: int, detail: str) -> None:
        self.refused.append((source, version))

    async def until(self, condition: Callable[[], object]) -> None:
        await until(self.store, condition)

    async def has(self, version: int) -> Snapshot:
        await self.until(lambda: version in self.installed)
        snapshot = self.store.get(version)
        assert snapshot is not None
        return snapshot

    def leaves(self, version: int) -> int:
        """Verified leaves of a version here."""
        reader = self.store.open(version)
        if reader is None:
            return -1
        with reader:
            return reader.ready


async def until(store: SnapshotStore, condition: Callable[[], object]) -> None:
    """Wait for a condition that a change of the store makes true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while True:
        seen = store.changes.count
        if condition():
            return
        left = deadline - loop.time()
        assert left > 0, "the condition did not come true in time"
        await store.changes.wait(seen, left)


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(node.puller.run()) for node in nodes]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=DEADLINE_S)


Script = Callable[["FakeUpstream", int, asyncio.StreamWriter], Awaitable[None]]


class FakeUpstream:
    """Speaks the relay's HTTP on a real socket, announces `snapshot`, and streams what `script` writes."""

    def __init__(self, snapshot: Snapshot, script: Script) -> None:
        self.snapshot = snapshot
        self.document = snapshot.document
        self.delta = b""
        """Document of the delta that it offers in place of the whole version."""
        self.script = script
        self.asked: list[int] = []
        """`from_leaf` of each stream request."""
        self.announces = True
        self.polled = asyncio.Event()
        self.release = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.release.set()
            for task in self._tasks:
                task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self._answer(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        writer.close()

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        path = request.split()[1].decode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
        if path.startswith("/snapshots/next"):
            after = int(path.split("after=")[1].split("&")[0])
            self.polled.set()
            if self.announces and after < self.snapshot.version:
                body = self.document + self.delta
                offer = b"Echo2-Delta: %d\r\n" % len(self.delta) if self.delta else b""
                writer.write(head + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            else:
                await self.release.wait()
            return
        first = int(path.split("from_leaf=")[1].split("&")[0])
        self.asked.append(first)
        writer.write(head + b"\r\n")
        await self.script(self, first, writer)

    def frame(self, n: int) -> bytes:
        return frame(n, leaf(self.snapshot, n))


class MemoryObjects:
    """An object store in memory, and an HTTP transport that serves it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.order: list[str] = []
        self.ranges: list[str] = []
        self.authorization: set[str] = set()
        self.knows_ranges = True

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.order.append(key)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get(self, key: str, most: int | None = None) -> bytes:
        return self.objects[key]

    def head(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key, len(self.objects[key])) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(k, len(v)) for k, v in sorted(self.objects.items()) if k.startswith(prefix))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def presign_get(self, key: str, expires_s: int) -> str:
        return f"http://store.invalid/{key}"

    def presign_put(self, key: str, expires_s: int, max_bytes: int) -> PresignedPut:
        return PresignedPut(self.presign_get(key, expires_s), {})

    async def fetch_urls(self, version: int, first: int, count: int) -> SnapshotUrls:
        base = f"jobs/j/snapshots/{version}"
        made = DeltaUrls(
            manifest_url=self.presign_get(f"{base}/delta/manifest.json", 60),
            version_url=self.presign_get(f"{base}/delta/version.json", 60),
            chunk_urls={n: self.presign_get(f"{base}/delta/chunks/{n}", 60) for n in range(first, first + count)},
        )
        return SnapshotUrls(
            version=version,
            manifest_url=self.presign_get(f"{base}/manifest.json", 60),
            chunk_urls={n: self.presign_get(f"{base}/chunks/{n}", 60) for n in range(first, first + count)},
            delta=made if f"{base}/delta/manifest.json" in self.objects else None,
            parts=[part for v in range(version + 1) for part in self._parts(v)],
        )

    def _parts(self, version: int) -> list[StoredPart]:
        found = []
        for place in (f"jobs/j/snapshots/{version}", f"jobs/j/snapshots/{version}/delta"):
            document = self.objects.get(f"{place}/manifest.json")
            if document is not None:
                manifest = verify(document, public_key=public_hex(KEY), job_id="j")
                found.append(StoredPart(version=version, base=manifest.base, bytes=manifest.payload_bytes))
        return found

    def client(self) -> httpx.AsyncClient:
        """Requests to `store.invalid` are answered from memory, all others go out."""
        return httpx.AsyncClient(mounts={"http://store.invalid": httpx.MockTransport(self._serve)})

    def _serve(self, request: httpx.Request) -> httpx.Response:
        self.authorization.add(request.headers.get("authorization", ""))
        data = self.objects.get(request.url.path.lstrip("/"))
        if data is None:
            return httpx.Response(404)
        asked = request.headers.get("range")
        if asked is not None:
            self.ranges.append(asked)
        if asked is None or not self.knows_ranges:
            return httpx.Response(200, stream=_Pieces(data))
        return httpx.Response(206, stream=_Pieces(data[int(asked.removeprefix("bytes=").rstrip("-")) :]))


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._data), 700):
            yield self._data[at : at + 700]
