"""What a node asks its source for, what it takes of the answer, and which connections it keeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from app.protocol.errors import IntegrityError
from app.protocol.node import SnapshotUrls
from app.snapshots.connection import Lost
from app.snapshots.frames import KEEP_ALIVE, frame
from app.snapshots.manifest import Manifest
from app.snapshots.sources import Source
from app.snapshots.upstream import KEPT_CONNECTIONS, Wire
from tests.unit.snapshots.test_manifest import PAYLOAD, manifest

LEAVES = [PAYLOAD[i : i + 256] for i in range(0, len(PAYLOAD), 256)]
FRAMES = b"".join(frame(n, leaf) for n, leaf in enumerate(LEAVES))
NONE = b"HTTP/1.1 204 No Content\r\n\r\n"


def answer(body: bytes, *headers: str, status: int = 200, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Relay:
    """Gives the answers it was told to give, in order, and keeps what it was asked."""

    def __init__(self, url: str, *answers: bytes) -> None:
        self.source = Source("peer", url, "n")
        self.answers = list(answers)
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.left = asyncio.Event()
        """A connection was closed at the other end."""


@asynccontextmanager
async def relay(*answers: bytes, base: str = "", closes: bool = False) -> AsyncIterator[Relay]:
    """`closes`: each connection after one answer."""
    made = Relay("", *answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while made.answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                made.paths.append(head[0])
                made.headers.append(dict(line.split(": ", 1) for line in head[1:] if line))
                writer.write(made.answers.pop(0))
                await writer.drain()
                if closes:
                    break
        made.left.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.source = Source("peer", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{base}", "n")
    try:
        yield made
    finally:
        server.close()


async def no_urls(version: int, first: int, count: int) -> SnapshotUrls:
    raise AssertionError("the store is not asked")


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    def never(_: httpx.Request) -> httpx.Response:
        raise AssertionError("a plain relay is not asked over the general client")

    async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as client:
        made = Wire(client, token="secret", stall_s=5.0, answer_s=10.0, fetch_urls=no_urls)
        yield made
        made.close()


async def leaves(wire: Wire, source: Source, of: Manifest, first: int = 0, count: int | None = None) -> list[bytes]:
    found: list[bytes] = []
    async for n, leaf in wire.relay_leaves(source, of, first, count=count):
        assert n == first + len(found)
        found.append(bytes(leaf))
    return found


async def test_an_announcement_is_asked_for_with_what_is_held_and_the_connection_is_kept(wire: Wire) -> None:
    async with relay(NONE, NONE, base="/relays/7/") as source:
        assert await wire.poll(source.source, 3, 0.5) is None
        assert await wire.poll(source.source, -1, 25.0, list(range(20, 0, -1))) is None
    assert source.paths == [
        "GET /relays/7/snapshots/next?after=3&wait_s=0.5 HTTP/1.1",
        "GET /relays/7/snapshots/next?after=-1&wait_s=25 HTTP/1.1",
    ]
    first, second = source.headers
    assert (first["Authorization"], first["Echo2-Follow"]) == ("Bearer secret", "1")
    assert "Echo2-Bases" not in first
    assert second["Echo2-Bases"] == "20,19,18,17,16,15,14,13,12,11,10,9,8,7,6,5", "no more than 16"
    assert source.connections == 1


async def test_a_relay_that_sends_the_document_alone_is_asked_for_the_leaves(wire: Wire) -> None:
    async with relay(answer(b"document"), answer(FRAMES + KEEP_ALIVE * 3)) as source:
        told = await wire.poll(source.source, -1, 0.0)
        assert told is not None
        assert (told.document, told.delta, told.stream) == (b"document", b"", None)
        assert await leaves(wire, source.source, manifest()) == LEAVES
    assert source.paths[1] == "GET /snapshots/3/stream?from_leaf=0 HTTP/1.1"
    assert source.headers[1]["Authorization"] == "Bearer secret"
    assert source.connections == 1


async def test_leaves_that_follow_an_announcement_come_on_its_connection_which_is_kept_then(wire: Wire) -> None:
    body = b"versiondelta" + KEEP_ALIVE + FRAMES + KEEP_ALIVE * 2
    async with relay(answer(body, "Echo2-Document: 12", "Echo2-Delta: 5"), NONE) as source:
        told = await wire.poll(source.source, 2, 0.0, [2])
        assert told is not None
        assert (told.document, told.delta) == (b"version", b"delta")
        assert told.stream is not None
        found = [bytes(leaf) async for _, leaf in wire.relay_leaves(source.source, manifest(), 0, told.stream)]
        assert found == LEAVES
        assert await wire.poll(source.source, 3, 0.0) is None
    assert source.connections == 1


async def test_a_document_larger_than_what_is_read_at_once_ends_where_the_leaves_begin(wire: Wire) -> None:
    document = b"d" * 200_001
    async with relay(answer(document + FRAMES, f"Echo2-Document: {len(document)}")) as source:
        told = await wire.poll(source.source, -1, 0.0)
        assert told is not None
        assert told.document == document
        found = [bytes(leaf) async for _, leaf in wire.relay_leaves(source.source, manifest(), 0, told.stream)]
        assert found == LEAVES


@pytest.mark.parametrize("unneeded", [0, 1, 255, 256, 300])
async def test_keep_alives_that_were_not_needed_are_read_and_the_connection_is_kept(wire: Wire, unneeded: int) -> None:
    async with relay(answer(FRAMES + KEEP_ALIVE * unneeded), NONE) as source:
        assert await leaves(wire, source.source, manifest()) == LEAVES
        assert await wire.poll(source.source, 3, 0.0) is None
    assert source.connections == 1


@pytest.mark.parametrize(
    ("headers", "body", "error"),
    [
        (["Echo2-Document: x"], b"document", IntegrityError),
        (["Echo2-Document: -1"], b"document", IntegrityError),
        (["Echo2-Document: 10000000000"], b"document", IntegrityError),
        (["Echo2-Document: 9999"], b"document", Lost),  # it ends before
        (["Echo2-Delta: 0"], b"document", IntegrityError),
        (["Echo2-Delta: 8"], b"document", IntegrityError),
        (["Echo2-Delta: x"], b"document", IntegrityError),
        (["Echo2-Delta: -1"], b"document", IntegrityError),
        (["Echo2-Delta: 00000000001"], b"document", IntegrityError),
    ],
)
async def test_sizes_that_can_t_be_are_refused(
    wire: Wire, headers: list[str], body: bytes, error: type[Exception]
) -> None:
    async with relay(answer(body, *headers)) as source:
        with pytest.raises(error):
            await wire.poll(source.source, -1, 0.0)


async def test_a_document_beyond_its_bound_is_refused_before_it_is_read(wire: Wire) -> None:
    most = 64 * 1024 * 1024
    async with relay(answer(b"it would come", f"Echo2-Document: {most + 1}"), NONE) as source:
        with pytest.raises(IntegrityError, match=f"longer than {most} bytes"):
            await wire.poll(source.source, -1, 0.0)


@pytest.mark.parametrize("status", [401, 404, 302, 500])
async def test_whoever_answers_something_else_is_lost(wire: Wire, status: int) -> None:
    async with relay(answer(b"no", status=status), answer(b"no", status=status)) as source:
        with pytest.raises(Lost):
            await wire.poll(source.source, -1, 0.0)
        with pytest.raises(Lost):
            await leaves(wire, source.source, manifest())


@pytest.mark.parametrize(("count", "path"), [(None, "from_leaf=2"), (1, "from_leaf=2&leaves=1")])
async def test_what_is_here_already_is_not_asked_for_again(wire: Wire, count: int | None, path: str) -> None:
    body = b"".join(frame(n, LEAVES[n]) for n in range(2, 5))
    async with relay(answer(body)) as source:
        assert await leaves(wire, source.source, manifest(), 2, count) == LEAVES[2:]
    assert source.paths == [f"GET /snapshots/3/stream?{path} HTTP/1.1"]


async def test_a_delta_s_leaves_are_asked_for_as_such(wire: Wire) -> None:
    step = {"base_blake3": "0" * 64, "result_bytes": 1, "result_blake3": "0" * 64}
    of = manifest(kind="delta", codec="delta", base=2, delta=step, tensors=[])
    async with relay(answer(FRAMES)) as source:
        assert await leaves(wire, source.source, of) == LEAVES
    assert source.paths == ["GET /snapshots/3/delta?from_leaf=0 HTTP/1.1"]


@pytest.mark.parametrize("upto", [0, 5, 264, 300, len(FRAMES) - 1])
async def test_a_stream_that_ends_before_its_last_leaf_is_lost(wire: Wire, upto: int) -> None:
    async with relay(answer(FRAMES[:upto])) as source:
        with pytest.raises(Lost, match=r"before leaf|closed|ended"):
            await leaves(wire, source.source, manifest())


@pytest.mark.parametrize("rest", [b"x", KEEP_ALIVE + b"y" * 8, KEEP_ALIVE * 256 + b"z", frame(5, b"more")])
async def test_nothing_but_keep_alives_may_come_behind_the_last_leaf(wire: Wire, rest: bytes) -> None:
    async with relay(answer(FRAMES + rest)) as source:
        with pytest.raises(IntegrityError, match="after the last leaf"):
            await leaves(wire, source.source, manifest())


async def test_one_leaf_is_asked_for_alone(wire: Wire) -> None:
    async with relay(answer(frame(3, LEAVES[3])), answer(b"")) as source:
        assert await wire.one_leaf(source.source, manifest(), 3) == LEAVES[3]
        with pytest.raises(Lost):
            await wire.one_leaf(source.source, manifest(), 3)
    assert source.paths[0] == "GET /snapshots/3/stream?from_leaf=3&leaves=1 HTTP/1.1"


async def test_a_connection_that_was_closed_meanwhile_is_made_anew(wire: Wire) -> None:
    async with relay(NONE, NONE, closes=True) as source:
        for _ in range(2):
            assert await wire.poll(source.source, -1, 0.0) is None
    assert (source.connections, len(source.paths)) == (2, 2)


async def test_an_answer_that_was_not_read_to_its_end_is_not_kept(wire: Wire) -> None:
    async with relay(answer(b"no", status=500), NONE) as source:
        with pytest.raises(Lost):
            await wire.poll(source.source, -1, 0.0)
        assert await wire.poll(source.source, -1, 0.0) is None
    assert source.connections == 2


async def test_only_the_connections_used_last_are_kept(wire: Wire) -> None:
    async with contextlib.AsyncExitStack() as stack:
        many = [await stack.enter_async_context(relay(NONE, NONE)) for _ in range(KEPT_CONNECTIONS + 1)]
        for source in many:
            assert await wire.poll(source.source, -1, 0.0) is None
        await asyncio.wait_for(many[0].left.wait(), 10)
        assert not any(source.left.is_set() for source in many[1:])
        for source in reversed(many):
            assert await wire.poll(source.source, -1, 0.0) is None
        assert [source.connections for source in many] == [2, *[1] * KEPT_CONNECTIONS]


BEHIND_TLS = Source("peer", "https://relay.example/base/", "n")


def streamed(body: bytes = b"", status: int = 200, delta: str = "") -> httpx.Response:
    return httpx.Response(status, headers={"Echo2-Delta": delta} if delta else {}, stream=httpx.ByteStream(body))


@asynccontextmanager
async def over_web(*answers: httpx.Response) -> AsyncIterator[tuple[Wire, list[httpx.Request]]]:
    asked: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[len(asked) - 1]

    async with httpx.AsyncClient(transport=httpx.MockTransport(serve)) as client:
        made = Wire(client, token="secret", stall_s=5.0, answer_s=10.0, fetch_urls=no_urls)
        yield made, asked
        made.close()


async def test_a_relay_behind_tls_is_asked_over_the_general_client_for_documents_alone() -> None:
    told = streamed(b"versiondelta", delta="5")
    async with over_web(streamed(status=204), told, streamed(status=500)) as (wire, asked):
        assert await wire.poll(BEHIND_TLS, 3, 2.0) is None
        found = await wire.poll(BEHIND_TLS, 3, 2.0, [3, 2])
        assert found is not None
        assert (found.document, found.delta, found.stream) == (b"version", b"delta", None)
        with pytest.raises(Lost):
            await wire.poll(BEHIND_TLS, 3, 2.0)
    assert {str(request.url) for request in asked} == {"https://relay.example/base/snapshots/next?after=3&wait_s=2"}
    assert {request.headers["Authorization"] for request in asked} == {"Bearer secret"}
    assert "Echo2-Follow" not in asked[0].headers
    assert asked[1].headers["Echo2-Bases"] == "3,2"


async def test_leaves_come_from_a_relay_behind_tls_as_from_others() -> None:
    cut, absent = streamed(FRAMES[:-1]), streamed(FRAMES, 404)
    async with over_web(streamed(FRAMES + KEEP_ALIVE), cut, absent) as (wire, asked):
        assert await leaves(wire, BEHIND_TLS, manifest()) == LEAVES
        for _ in range(2):
            with pytest.raises(Lost):
                await leaves(wire, BEHIND_TLS, manifest(), count=4)
    assert [request.url.raw_path.decode() for request in asked] == [
        "/base/snapshots/3/stream?from_leaf=0",
        *["/base/snapshots/3/stream?from_leaf=0&leaves=4"] * 2,
    ]
