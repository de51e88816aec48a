"""The relay's stream is read right however HTTP frames it and the network cuts it, and nothing else is taken for it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from app.snapshots import connection as connection_module
from app.snapshots.connection import Connection, Ended, Lost, direct

BODY = bytes(range(256)) * 600
SILENCE_S = 5.0
NO_FAMILY = 12
"""DECnet's, which Linux has no longer."""


@contextlib.asynccontextmanager
async def answering(*answers: Sequence[bytes], hang: bool = False) -> AsyncIterator[Connection]:
    """A connection to a server that gives one answer per request, piece by piece, and then closes or hangs."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            if hang:
                await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = await Connection.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield connection
    finally:
        connection.close()
        over.set()
        server.close()


async def whole_body(connection: Connection, piece: int) -> bytes:
    found = bytearray()
    while True:
        into = bytearray(piece)
        got = await connection.read(memoryview(into), SILENCE_S)
        found += into[:got]
        if got < piece:
            return bytes(found)


async def get_and_read(connection: Connection) -> None:
    await connection.get("/", {}, SILENCE_S)
    await whole_body(connection, 4096)


def chunked(sizes: Sequence[int]) -> bytes:
    text, at = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0
    for size in sizes:
        part = BODY[at : at + size]
        text += b"%x\r\n" % len(part) + part + b"\r\n"
        at += size
    return text + b"0\r\n\r\n"


@pytest.mark.parametrize("piece", [1000, 65_536, len(BODY) + 1])
@pytest.mark.parametrize("cut", [7, 1448, 10**9])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_a_body_comes_out_whole(framing: str, cut: int, piece: int) -> None:
    body = BODY if cut > 7 else BODY[:3000]
    if framing == "chunked":
        text = chunked([1, 8, 4000, len(body) - 4009] if cut > 7 else [1, 8, 2991])
    elif framing == "length":
        text = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    else:
        text = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body
    async with answering([text[i : i + cut] for i in range(0, len(text), cut)]) as connection:
        await connection.get("/", {}, SILENCE_S)
        assert connection.status == 200
        assert await whole_body(connection, piece) == body
        assert connection.idle == (framing != "close")


async def test_a_connection_serves_further_requests() -> None:
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with answering([chunked([500])], [empty], [chunked([9])]) as connection:
        for status, body in ((200, BODY[:500]), (204, b""), (200, BODY[:9])):
            await connection.get("/", {}, SILENCE_S)
            assert (connection.status, await whole_body(connection, 4096)) == (status, body)
            assert connection.idle
        with pytest.raises(Ended):
            await connection.get("/", {}, SILENCE_S)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"5" * 300,
    ],
)
async def test_what_is_no_answer_is_a_lost_source(text: bytes) -> None:
    async with answering([text]) as connection:
        with pytest.raises(Lost):
            await get_and_read(connection)


async def test_silence_is_a_lost_source_and_a_trickle_is_not() -> None:
    """The process is woken for large pieces only; a few bytes in all the time that it waits count all the same."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    async with answering([head], hang=True) as connection:
        await connection.get("/", {}, SILENCE_S)
        with pytest.raises(Lost, match="silent"):
            await connection.read(memoryview(bytearray(1000)), 0.05)

    async with answering([head, b"x" * 600], hang=True) as connection:
        await connection.get("/", {}, SILENCE_S)
        assert await connection.read(memoryview(bytearray(600)), SILENCE_S) == 600


async def test_half_a_leaf_does_not_put_off_the_end_of_a_silent_source() -> None:
    """What came before the silence lies below the low-water mark, and is seen only when somebody looks."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    async with answering([head + b"x" * 30_000], hang=True) as connection:
        await connection.get("/", {}, SILENCE_S)
        started = time.monotonic()
        with pytest.raises(Lost, match="silent"):
            await connection.read(memoryview(bytearray(100_000)), 2.0)
        assert 2.0 <= time.monotonic() - started < 3.9


async def test_a_trickle_below_the_mark_is_not_silence() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 6000\r\n\r\n"
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        for _ in range(6):
            writer.write(b"x" * 1000)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(go_on.wait(), 0.4)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = await Connection.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await connection.get("/", {}, SILENCE_S)
    assert await connection.read(memoryview(bytearray(6000)), 1.5) == 6000
    connection.close()
    server.close()


async def test_nobody_there_is_a_lost_source() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(Lost):
        await Connection.open(f"http://127.0.0.1:{port}")


def test_only_plain_http_without_a_proxy_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert direct("http://10.0.0.1:7000")
    assert not direct("https://10.0.0.1:7000")
    assert not direct("")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    assert not direct("http://10.0.0.1:7000")
    monkeypatch.setenv("no_proxy", "10.0.0.1")
    assert direct("http://10.0.0.1:7000")


def names(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """A name that stands for an address of a family that no machine has, and then for these ports of loopback."""
    found: list[object] = [(NO_FAMILY, socket.SOCK_STREAM, 6, "", ("::1", 1))]
    found += [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


async def test_a_name_with_addresses_that_nobody_listens_on_is_reached_at_the_others(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """As `localhost` for a relay that is bound to 127.0.0.1, and every host with IPv6 for one that is bound to IPv4."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        names(monkeypatch, unused_tcp_port, server.sockets[0].getsockname()[1])
        (await Connection.open("http://learner.example:7070")).close()
    names(monkeypatch, unused_tcp_port)
    with pytest.raises(Lost, match="ConnectionRefusedError"):
        await Connection.open("http://learner.example:7070")
    names(monkeypatch)
    with pytest.raises(Lost, match="OSError"):
        await Connection.open("http://learner.example:7070")


async def test_an_address_that_swallows_what_is_sent_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CONNECT_S", 0.4)
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(full.getsockname())

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    try:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            names(monkeypatch, full.getsockname()[1], server.sockets[0].getsockname()[1])
            (await Connection.open("http://learner.example:7070")).close()
    finally:
        for one in (full, *waiting):
            one.close()
