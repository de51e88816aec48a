"""The machine's network link: metered, rate-limited, and the only way in or out.

Invariant: every byte that is passed on was counted first, in the machine's own view: `up` leaves it, `down` reaches
it. A machine reaches out through a SOCKS5 gateway (RFC 1928, CONNECT, no authentication) and is reached through
forwarded ports; all of it on loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

log = logging.getLogger(__name__)
CHUNK = 64 * 1024
HANDSHAKE_S = 10.0
CONNECT_S = 10.0
IDLE_S = 900.0
BURST_S = 0.05

Direction = Literal["up", "down"]


class Bucket:
    """A rate in bytes/s as a schedule: `reserve(n)` says how long to wait before n more bytes may go."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._ready = clock()

    def reserve(self, count: int) -> float:
        """Seconds to wait; the reservation is taken."""
        now = self._clock()
        self._ready = max(self._ready, now - BURST_S) + count / self._rate
        return max(0.0, self._ready - now)


class Link:
    """Counters and rates of one machine."""

    def __init__(self, up_mbps: float, down_mbps: float) -> None:
        self._buckets = {"up": Bucket(up_mbps * 125_000), "down": Bucket(down_mbps * 125_000)}
        self._bytes = {"up": 0, "down": 0}
        self.total = {"up": 0, "down": 0}

    def drain(self) -> tuple[int, int]:
        """(up, down) bytes since the last call."""
        taken = self._bytes["up"], self._bytes["down"]
        self._bytes = {"up": 0, "down": 0}
        return taken

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        """Pass bytes on until the source ends; then close that half."""
        while True:
            async with asyncio.timeout(IDLE_S):
                data = await reader.read(CHUNK)
            if not data:
                break
            self._bytes[way] += len(data)
            self.total[way] += len(data)
            if (wait := self._buckets[way].reserve(len(data))) > 0:
                await asyncio.sleep(wait)
            writer.write(data)
            async with asyncio.timeout(IDLE_S):
                await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def join(
        self, inside: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        outside: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:  # fmt: skip
        """Tie a socket of the machine to one of the world until either fails or both have ended."""
        up = asyncio.ensure_future(self.pump(inside[0], outside[1], "up"))
        down = asyncio.ensure_future(self.pump(outside[0], inside[1], "down"))
        try:
            await asyncio.gather(up, down)
        except (OSError, TimeoutError) as error:
            log.debug("relay ended: %s", error)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)


class _Listener:
    """A loopback server whose connections end with it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("a listener handles its connections")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handle(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("connection ended: %s", error)
        finally:
            await close_writer(writer)

    async def open(self) -> int:
        """Listen on a free port and return it."""
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Close without waiting for a peer that does not answer."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.wait_closed()


class PortForward(_Listener):
    """A published port: the world connects to `port`, the machine's process listens on `target`."""

    def __init__(self, link: Link, host: str, target: int) -> None:
        super().__init__(host)
        self._link = link
        self._target = target

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_S):
            inner = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await self._link.join(inner, (reader, writer))
        finally:
            await close_writer(inner[1])


class SocksGateway(_Listener):
    """The way out of one machine."""

    def __init__(self, link: Link, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self._link = link

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            target = await self._negotiate(reader, writer)
        if target is None:
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                outer = await asyncio.open_connection(*target)
        except (OSError, TimeoutError) as error:
            writer.write(_reply(5 if isinstance(error, ConnectionRefusedError) else 4))
            return
        try:
            writer.write(_reply(0))
            await self._link.join((reader, writer), outer)
        finally:
            await close_writer(outer[1])

    async def _negotiate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int] | None:
        version, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        if version != 5 or 0 not in methods:
            writer.write(b"\x05\xff")
            return None
        writer.write(b"\x05\x00")
        version, command, _, kind = await reader.readexactly(4)
        host = await _address(reader, kind)
        if version != 5 or command != 1 or host is None:
            writer.write(_reply(7 if host is not None else 8))
            return None
        (port,) = struct.unpack("!H", await reader.readexactly(2))
        return host, port


async def _address(reader: asyncio.StreamReader, kind: int) -> str | None:
    if kind == 1:
        return str(ipaddress.IPv4Address(await reader.readexactly(4)))
    if kind == 4:
        return str(ipaddress.IPv6Address(await reader.readexactly(16)))
    if kind == 3:
        (length,) = await reader.readexactly(1)
        return (await reader.readexactly(length)).decode("idna")
    return None


def _reply(code: int) -> bytes:
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def close_all(*closers: Coroutine[Any, Any, None]) -> None:
    """Close several listeners together."""
    await asyncio.gather(*closers)
