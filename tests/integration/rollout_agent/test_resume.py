"""Model files from a server that cuts connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from app.protocol.errors import IntegrityError, Unavailable
from app.protocol.node import AssetRef
from app.rollout_agent.assets import fetch_assets
from app.rollout_agent.client import NodeClient

DATA = bytes(range(256)) * 4096


@dataclass
class Cutter:
    """Sends at most `most` bytes a connection, then closes it."""

    most: int
    ranges: bool = True
    data: bytes = DATA
    starts: list[int] = field(default_factory=list)
    """The byte that each request began at."""
    sent: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        found = re.search(r"range: bytes=(\d+)-", head, re.IGNORECASE)
        start = int(found[1]) if found and self.ranges else 0
        self.starts.append(start)
        if start >= len(self.data):
            writer.write(b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            rest = self.data[start:]
            status = f"206 Partial Content\r\nContent-Range: bytes {start}-{len(self.data) - 1}/{len(self.data)}"
            head = (
                f"HTTP/1.1 {status if start else '200 OK'}\r\nContent-Length: {len(rest)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + rest[: self.most])
            self.sent += len(rest[: self.most])
        await writer.drain()
        writer.close()

    def asset(self) -> AssetRef:
        """The file, as the control service announces it."""
        url = f"http://127.0.0.1:{self.port}/model.safetensors"
        return AssetRef(path="model.safetensors", size=len(DATA), blake3=blake3(DATA).hexdigest(), url=url)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@asynccontextmanager
async def serving(cutter: Cutter) -> AsyncIterator[tuple[Cutter, NodeClient]]:
    async def no_pause(_: float) -> None:
        return None

    server = await asyncio.start_server(cutter.serve, "127.0.0.1", 0)
    cutter.port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient() as http:
        yield cutter, NodeClient("http://127.0.0.1:1", http, sleep=no_pause)


async def test_a_download_goes_on_at_the_byte_where_it_was_cut(tmp_path: Path) -> None:
    told: list[int] = []
    async with serving(Cutter(most=100_000)) as (cutter, client):
        await fetch_assets(client, [cutter.asset()], tmp_path, lambda have, total, name: told.append(have))
        assert (tmp_path / "model.safetensors").read_bytes() == DATA
        assert len(cutter.starts) == 11, "more cuts than a call has retries"
        assert cutter.starts == [n * 100_000 for n in range(11)]
        assert cutter.sent == len(DATA), "no byte came twice"
        assert client.bytes_down == len(DATA)
    assert told == sorted(told)
    assert told[-1] == len(DATA)
    assert names(tmp_path) == ["model.safetensors"]


async def test_another_process_goes_on_with_what_the_first_one_left(tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.part").write_bytes(DATA[:999_999])
    async with serving(Cutter(most=10**9)) as (cutter, client):
        await fetch_assets(client, [cutter.asset()], tmp_path)
        assert cutter.starts == [999_999]
        await fetch_assets(client, [cutter.asset()], tmp_path)
        assert cutter.starts == [999_999], "what is there and right is not fetched again"
    assert (tmp_path / "model.safetensors").read_bytes() == DATA


async def test_what_was_left_and_is_wrong_is_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.part").write_bytes(b"\0" * 500_000)
    async with serving(Cutter(most=10**9)) as (cutter, client):
        await fetch_assets(client, [cutter.asset()], tmp_path)
        assert cutter.starts == [500_000, 0]
    assert (tmp_path / "model.safetensors").read_bytes() == DATA


async def test_a_source_that_can_t_go_on_sends_all_of_it(tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.part").write_bytes(DATA[:500_000])
    async with serving(Cutter(most=10**9, ranges=False)) as (cutter, client):
        await fetch_assets(client, [cutter.asset()], tmp_path)
        assert cutter.starts == [0]
    assert (tmp_path / "model.safetensors").read_bytes() == DATA


async def test_a_source_that_never_comes_further_is_given_up(tmp_path: Path) -> None:
    async with serving(Cutter(most=0)) as (cutter, client):
        with pytest.raises(Unavailable):
            await fetch_assets(client, [cutter.asset()], tmp_path)
        assert len(cutter.starts) == 5


async def test_other_bytes_are_refused_in_the_end(tmp_path: Path) -> None:
    async with serving(Cutter(most=10**9, data=DATA[:-1] + b"x")) as (cutter, client):
        with pytest.raises(IntegrityError, match=r"model\.safetensors"):
            await fetch_assets(client, [cutter.asset()], tmp_path)
        assert names(tmp_path) == []
