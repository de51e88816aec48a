"""Model files from a Hugging Face Hub on loopback, and what becomes of them where it fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import httpx
import pytest
from blake3 import blake3

from app.protocol.errors import EchoError, IntegrityError, Unavailable
from app.protocol.hub import HubRef
from app.protocol.node import AssetRef
from app.rollout_agent.assets import STORE_LOOK_S, STORE_WAIT_S, TELL_LOOKS, fetch_assets
from app.rollout_agent.client import NodeClient
from app.rollout_agent.hub import HUB, Hub

DATA = bytes(range(256)) * 4096
SHA = "0123456789abcdef0123456789abcdef01234567"
REF = HubRef(repo="org/m", revision=SHA)
NAME = "model.safetensors"
RESOLVE = f"/org/m/resolve/{SHA}/{NAME}"

Mood = Literal[
    "good", "renamed", "cut", "cut_off", "hang", "hang_late", "loop", "insecure", "far", "wrong", "longer", "shorter",
    "401", "403", "404", "410", "429", "500",
]  # fmt: skip
Asked = tuple[str, int]
"""The path of a request, and the byte that it began at."""


@dataclass
class StandIn:
    """The Hub with its content network (`/cdn/…`), and the object store (`/store/…`)."""

    mood: Mood = "good"
    absent: int = 0
    """So many times the store does not have it yet."""
    absent_status: int = 404
    store_data: bytes = DATA
    asked: list[Asked] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            found = re.search(r"range: bytes=(\d+)-", head, re.IGNORECASE)
            path, start = head.split()[1], int(found[1]) if found else 0
            self.asked.append((path, start))
            self.heads.append(head)
            if self._hangs(path):
                await reader.read()  # until the client goes
            else:
                self._answer(path, start, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _hangs(self, path: str) -> bool:
        late = self.mood == "hang_late" and len(self.starts("/cdn/")) > 1
        return path.startswith("/cdn/") if late else self.mood == "hang" and path.startswith("/org/")

    def _answer(self, path: str, start: int, writer: asyncio.StreamWriter) -> None:
        if path.startswith("/store/"):
            if self.absent:
                self.absent -= 1
                return _status(writer, self.absent_status)
            return self._send(writer, self.store_data, start, len(DATA))
        if path.startswith("/cdn/"):
            return self._network(writer, start)
        if self.mood.isdigit():
            return _status(writer, int(self.mood))
        elsewhere = {
            "loop": path,
            "insecure": f"http://cdn.example.org/{NAME}?signature=secret",
            "far": f"https://127.0.0.1:{self.port}/cdn/{NAME}?signature=secret",
        }
        if self.mood == "renamed" and path == RESOLVE:
            return _redirect(writer, 307, path.replace("org/m", "org/new-name"))
        return _redirect(writer, 302, elsewhere.get(self.mood, f"/cdn/{NAME}?signature=secret"))

    def _network(self, writer: asyncio.StreamWriter, start: int) -> None:
        if self.mood == "cut_off" and len(self.starts("/cdn/")) > 3:
            return _status(writer, 403)
        data = {"wrong": DATA[:-1] + b"x", "longer": DATA + b"x", "shorter": DATA[:-1]}.get(self.mood, DATA)
        self._send(writer, data, start, 100_000 if self.mood in ("cut", "cut_off", "hang_late") else len(data))

    def _send(self, writer: asyncio.StreamWriter, data: bytes, start: int, most: int) -> None:
        if start >= len(data):
            return _status(writer, 416)
        rest = data[start:]
        status = f"206 Partial Content\r\nContent-Range: bytes {start}-{len(data) - 1}/{len(data)}"
        head = f"HTTP/1.1 {status if start else '200 OK'}\r\nContent-Length: {len(rest)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + rest[:most])
        self.sent += len(rest[:most])
        return None

    def asset(self, name: str = NAME) -> AssetRef:
        """The file, as the control service announces it."""
        url = f"http://127.0.0.1:{self.port}/store/{name}"
        return AssetRef(path=name, size=len(DATA), blake3=blake3(DATA).hexdigest(), url=url, hub=REF)

    def starts(self, prefix: str) -> list[int]:
        """Where requests under a path began."""
        return [start for path, start in self.asked if path.startswith(prefix)]


def _status(writer: asyncio.StreamWriter, status: int) -> None:
    writer.write(f"HTTP/1.1 {status} S\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())


def _redirect(writer: asyncio.StreamWriter, status: int, to: str) -> None:
    writer.write(f"HTTP/1.1 {status} S\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())


@dataclass
class Machine:
    """A node's means to fetch."""

    stand_in: StandIn
    client: NodeClient
    hub: Hub
    told: list[tuple[str, str]]
    """Files that the Hub did not give, and why."""
    pauses: list[float]

    async def fetch(self, folder: Path, *assets: AssetRef) -> list[int]:
        """All of `assets`, default the one file; how many bytes were there as they came."""
        bytes_told: list[int] = []
        wanted = assets or (self.stand_in.asset(),)
        async with asyncio.timeout(20):
            await fetch_assets(self.client, wanted, folder, lambda have, *_: bytes_told.append(have), self.hub)
        return bytes_told


@asynccontextmanager
async def machine(stand_in: StandIn) -> AsyncIterator[Machine]:
    pauses: list[float] = []
    told: list[tuple[str, str]] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def failed(name: str, why: str) -> None:
        told.append((name, why))

    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    stand_in.port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient() as http:
        client = NodeClient("http://127.0.0.1:1", http, sleep=pause)
        origin = replace(HUB, timeout=httpx.Timeout(0.3))
        hub = Hub(f"http://127.0.0.1:{stand_in.port}", failed, origin=origin)
        yield Machine(stand_in, client, hub, told, pauses)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("mood", ["good", "renamed"])
async def test_weights_come_from_the_hub_through_its_redirects_and_the_store_is_not_asked(
    mood: Mood, tmp_path: Path
) -> None:
    async with machine(StandIn(mood)) as node:
        told = await node.fetch(tmp_path)
        paths = [path.partition("?")[0] for path, _ in node.stand_in.asked]
        renamed = [RESOLVE.replace("org/m", "org/new-name")] if mood == "renamed" else []
        assert paths == [RESOLVE, *renamed, f"/cdn/{NAME}"]
        assert not any("authorization" in head.lower() for head in node.stand_in.heads)
        assert node.told == []
    assert told[-1] == len(DATA)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert names(tmp_path) == [NAME]


async def test_a_download_from_the_hub_goes_on_at_the_byte_where_it_was_cut(tmp_path: Path) -> None:
    async with machine(StandIn("cut")) as node:
        told = await node.fetch(tmp_path)
        assert node.stand_in.starts("/cdn/") == [n * 100_000 for n in range(11)], "more cuts than a call has retries"
        assert node.stand_in.starts("/org/") == [n * 100_000 for n in range(11)], "signed addresses are asked for anew"
        assert node.stand_in.sent == len(DATA), "no byte came twice"
        assert node.told == []
    assert told == sorted(told)
    assert (tmp_path / NAME).read_bytes() == DATA


async def test_another_process_goes_on_with_what_the_first_one_left(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.part").write_bytes(DATA[:999_999])
    async with machine(StandIn()) as node:
        await node.fetch(tmp_path)
        assert node.stand_in.sent == len(DATA) - 999_999
        asked = len(node.stand_in.asked)
        await node.fetch(tmp_path)
        assert len(node.stand_in.asked) == asked, "what is there and right is not fetched again"
    assert (tmp_path / NAME).read_bytes() == DATA


async def test_what_was_left_and_is_wrong_is_not_the_hub_s_fault(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.part").write_bytes(b"\0" * 500_000)
    async with machine(StandIn()) as node:
        await node.fetch(tmp_path)
        assert node.stand_in.starts("/cdn/") == [500_000, 0]
        assert node.told == []
    assert (tmp_path / NAME).read_bytes() == DATA


@pytest.mark.parametrize(
    ("mood", "says"),
    [
        ("401", "not public there"),
        ("403", "not public there"),
        ("404", "no such file there"),
        ("410", "HTTP 410"),
        ("429", "HTTP 429"),
        ("500", "HTTP 500"),
        ("hang", "does not answer"),
        ("loop", "more than 5 redirects"),
        ("insecure", "only https is"),
        ("far", "can't be reached"),
        ("wrong", "other bytes"),
        ("longer", "other bytes"),
        ("shorter", "other bytes"),
    ],
)
async def test_what_the_hub_does_not_give_comes_from_the_store_and_is_told(
    mood: Mood, says: str, tmp_path: Path
) -> None:
    async with machine(StandIn(mood)) as node:
        await node.fetch(tmp_path)
        assert node.stand_in.starts("/store/") == [0]
        [(name, why)] = node.told
        assert name == NAME
        assert says in why
        assert f"org/m at {SHA}" in why
        assert "secret" not in why
    assert (tmp_path / NAME).read_bytes() == DATA
    assert names(tmp_path) == [NAME]


@pytest.mark.parametrize(("mood", "had"), [("cut_off", 300_000), ("hang_late", 100_000)])
async def test_the_store_is_asked_only_for_what_the_hub_did_not_give(mood: Mood, had: int, tmp_path: Path) -> None:
    async with machine(StandIn(mood)) as node:
        await node.fetch(tmp_path)
        assert node.stand_in.starts("/store/") == [had]
        assert node.stand_in.sent == len(DATA)
        assert len(node.told) == 1
    assert (tmp_path / NAME).read_bytes() == DATA


async def test_a_hub_that_failed_once_is_not_asked_for_the_next_file(tmp_path: Path) -> None:
    async with machine(StandIn("hang")) as node:
        second = node.stand_in.asset("model-2.safetensors")
        await node.fetch(tmp_path, node.stand_in.asset(), second)
        assert len(node.stand_in.starts("/org/")) == 1 + HUB.retries
        assert len(node.told) == 1
    assert (tmp_path / second.path).read_bytes() == DATA


@pytest.mark.parametrize("status", [404, 403])
async def test_the_store_s_copy_is_waited_for_while_the_learner_puts_it_there(status: int, tmp_path: Path) -> None:
    async with machine(StandIn("404", absent=3, absent_status=status)) as node:
        await node.fetch(tmp_path)
        assert node.pauses.count(STORE_LOOK_S) == 3
        assert len(node.stand_in.starts("/store/")) == 4
    assert (tmp_path / NAME).read_bytes() == DATA


async def test_the_hub_s_failure_is_told_again_while_the_store_does_not_have_the_file(tmp_path: Path) -> None:
    async with machine(StandIn("404", absent=2 * TELL_LOOKS + 1)) as node:
        await node.fetch(tmp_path)
        assert node.pauses.count(STORE_LOOK_S) == 2 * TELL_LOOKS + 1
        assert len(node.told) == 3, "the first word may have been lost: nobody would upload the file"
        assert len(set(node.told)) == 1
    assert TELL_LOOKS * STORE_LOOK_S == 60
    assert (tmp_path / NAME).read_bytes() == DATA


async def test_a_file_that_is_nowhere_is_given_up_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    async with machine(StandIn("404", absent=10**6)) as node:
        with pytest.raises(Unavailable, match="ECHO2_HF_ENDPOINT") as raised:
            await node.fetch(tmp_path)
        assert sum(node.pauses) == STORE_WAIT_S
        assert "org/m" in raised.value.detail
        assert NAME in raised.value.detail


async def test_without_a_place_on_the_hub_the_store_is_not_waited_for(tmp_path: Path) -> None:
    async with machine(StandIn(absent=1)) as node:
        with pytest.raises(EchoError) as raised:
            await node.fetch(tmp_path, node.stand_in.asset().model_copy(update={"hub": None}))
        assert raised.value.code == "not_found"
        assert node.stand_in.asked == [(f"/store/{NAME}", 0)]


async def test_bytes_that_are_wrong_everywhere_are_refused(tmp_path: Path) -> None:
    async with machine(StandIn("wrong", store_data=DATA[::-1])) as node:
        with pytest.raises(IntegrityError, match=r"model\.safetensors"):
            await node.fetch(tmp_path)
    assert names(tmp_path) == []
