"""A source that always says something and never all of it is left in time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from app.protocol.node import SnapshotUrls
from app.snapshots import Source
from app.snapshots.connection import Lost
from app.snapshots.upstream import Wire

ANSWER_S = 0.3


@contextlib.asynccontextmanager
async def trickling(head: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers with `head`, and then a byte now and then."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            while not over.is_set():
                writer.write(b"x")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), 0.02)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"])
async def test_an_announcement_that_never_ends_is_left(head: bytes) -> None:
    async with trickling(head) as url, httpx.AsyncClient() as client:
        wire = Wire(client, token="t", stall_s=5.0, answer_s=ANSWER_S, fetch_urls=_no_urls)
        async with asyncio.timeout(4.0):
            with pytest.raises(Lost, match="no whole announcement"):
                await wire.poll(Source("learner", url), -1, 0.0)
        wire.close()


async def test_a_stored_document_that_never_ends_is_left() -> None:
    async with trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n") as url, httpx.AsyncClient() as client:

        async def urls(version: int, first: int, count: int) -> SnapshotUrls:
            return SnapshotUrls(version=version, manifest_url=url, chunk_urls={})

        wire = Wire(client, token="t", stall_s=5.0, answer_s=ANSWER_S, fetch_urls=urls)
        async with asyncio.timeout(4.0):
            with pytest.raises(Lost, match="no whole manifest"):
                await wire.store.step(1, -1, [])


async def _no_urls(version: int, first: int, count: int) -> SnapshotUrls:
    raise AssertionError("the store isn't asked")
