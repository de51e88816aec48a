"""A machine's bytes: counted, billed and slowed, through the gateway and the published ports."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from providers.base import Phase
from providers.marketplace import MarketConfig
from providers.marketplace.gateway import Link, PortForward, SocksGateway

from .rig import Rig

CLIENT = """python - <<'E'
import os, httpx
client = httpx.Client(timeout=30)
down = len(client.get("http://127.0.0.1:{port}/blob").content)
client.post("http://127.0.0.1:{port}/blob", content=b"u" * {up})
print("GOT", down, flush=True)
E
sleep 600
"""
SERVER = """python - <<'E'
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
class H(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "500000"); self.end_headers()
        self.wfile.write(b"x" * 500000)
HTTPServer(("127.0.0.1", int(os.environ["ECHO2_BIND_8000"])), H).serve_forever()
E
"""


@contextlib.asynccontextmanager
async def blob_server(size: int) -> AsyncIterator[int]:
    """An HTTP server outside of the market: GET gives `size` bytes, POST takes what comes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().split("\r\n")
                for line in lines:
                    if line.startswith("content-length:"):
                        await reader.readexactly(int(line.split(":")[1]))
                body = b"d" * size if head.startswith(b"GET") else b""
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_traffic_through_the_gateway_is_counted_and_billed(rig: Rig) -> None:
    async with blob_server(3_000_000) as port:
        made = await rig.rent(CLIENT.format(port=port, up=2_000_000), gpu="RTX 4090")
        assert "GOT 3000000" in await rig.log(made.instance_id, "GOT")
    state = await rig.state()
    billed = state["instances"][0]["by_kind"]
    # The cheapest RTX 4090 of the list asks $0.015 a GB down and $0.020 a GB up; headers add less than a KB.
    assert 45_000 / 1000 <= billed["bwd"] <= 45_000 / 1000 + 1
    assert 40_000 / 1000 <= billed["bwu"] <= 40_000 / 1000 + 1


async def test_a_published_port_reaches_the_process_and_is_counted(rig: Rig) -> None:
    made = await rig.rent(SERVER, ports=(8000,), gpu="RTX 4090")
    instance = await rig.phase(made.instance_id, Phase.RUNNING)
    port = instance.ports[8000]
    assert instance.public_host == "127.0.0.1"
    size = 0
    for _ in range(400):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(instance.public_host, port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            size = len(await reader.read(-1))
            writer.close()
        if size:
            break
        await asyncio.sleep(0.05)
    assert size > 500_000
    billed = (await rig.state())["instances"][0]["by_kind"]
    assert 10 <= billed["bwu"] <= 11  # 0.5 MB at $0.020/GB


async def test_the_link_is_as_slow_as_the_machine_says() -> None:
    """1.6 Mbit/s is 200 kB/s: 100 kB, less the burst of 50 ms, need at least 0.4 s, whatever the computer does."""
    link = Link(up_mbps=1.6, down_mbps=1000)
    gateway = SocksGateway(link)
    port = await gateway.open()
    async with blob_server(0) as target:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x05\x01\x00")
        assert await reader.readexactly(2) == b"\x05\x00"
        writer.write(b"\x05\x01\x00\x03\x09localhost" + target.to_bytes(2, "big"))
        assert (await reader.readexactly(10))[1] == 0
        begun = time.monotonic()
        body = b"POST / HTTP/1.1\r\ncontent-length: 100000\r\n\r\n" + b"u" * 100_000
        writer.write(body)
        async with asyncio.timeout(20):
            await reader.readuntil(b"\r\n\r\n")
        assert time.monotonic() - begun >= 0.4
        assert link.total["up"] == len(body)
        writer.close()
    await gateway.close()


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"\x04\x01\x00", b"\x05\xff"),  # SOCKS 4
        (b"\x05\x01\x02", b"\x05\xff"),  # wants a password
        (b"\x05\x01\x00\x05\x02\x00\x01\x7f\x00\x00\x01\x00\x50", b"\x05\x00\x05\x07"),  # BIND
        (b"\x05\x01\x00\x05\x01\x00\x09\x7f\x00\x00\x01\x00\x50", b"\x05\x00\x05\x08"),  # no such address type
        (b"\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x01", b"\x05\x00\x05\x05"),  # nobody listens on port 1
    ],
)
async def test_the_gateway_refuses_what_it_does_not_do(request_bytes: bytes, answer: bytes) -> None:
    link = Link(100, 100)
    gateway = SocksGateway(link)
    reader, writer = await asyncio.open_connection("127.0.0.1", await gateway.open())
    writer.write(request_bytes)
    async with asyncio.timeout(10):
        assert (await reader.read(-1))[: len(answer)] == answer
    writer.close()
    assert link.total == {"up": 0, "down": 0}
    await gateway.close()


async def test_a_closed_forward_cuts_its_connections() -> None:
    async with blob_server(10) as target:
        forward = PortForward(Link(100, 100), "127.0.0.1", target)
        reader, writer = await asyncio.open_connection("127.0.0.1", await forward.open())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(10):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(10)
            await forward.close()
            assert await reader.read(1) == b""
        writer.close()


def test_a_refused_setting_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="api_key"):
        MarketConfig(tmp_path, "")
    with pytest.raises(ValueError, match="port"):
        MarketConfig(tmp_path, "k", port=70_000)
    with pytest.raises(ValueError, match="speed"):
        MarketConfig(tmp_path, "k", speed=0.0)
    assert "k3y" not in repr(MarketConfig(tmp_path, "k3y"))
