"""One plain HTTP/1.1 connection to a relay, made for long streams of leaves.

Invariant: a body's bytes go from the kernel straight into the caller's buffer, and the process is woken per leaf, not
per packet. Everything read is bounded in size; silence longer than `silence_s` and whatever isn't
HTTP/1.1 raise Lost. A general client costs three to four times as much processor time here, and a node's processor
belongs to its engine.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
import time
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

CONNECT_S = 5.0
LOOK_S = 0.25
"""How often a source that sends little is looked at, to tell slow from silent."""
MAX_HEAD_BYTES = 32 * 1024
READ_BYTES = 8 * 1024
"""Read at once where headers are due: little, so that what follows them isn't copied."""
WAKE_BYTES = 128 * 1024
"""Most that is waited for before the process is woken: a leaf of the usual size."""


class Lost(Exception):
    """The source is dead, silent, or hasn't got what was asked for; another may."""


class Ended(Lost):
    """The connection was closed at the other end."""


def direct(url: str) -> bool:
    """Whether a relay is reached without TLS and without a proxy, so that a Connection will do."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxied = ("http" in proxies or "all" in proxies) and not urllib.request.proxy_bypass(host)
    return parts.scheme == "http" and bool(host) and not proxied


class Connection:
    """Requests one after the other. `idle`: the last answer was read to its end and another may be asked for."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.idle = True
        self.status = 0
        self.headers: dict[str, str] = {}
        self._sock = sock
        self._host = host
        self._buffer = bytearray(READ_BYTES)
        self._begin = self._end = 0
        self._low_water = 1
        self._left: int | None = None
        """Bytes to come of the body, or of its current piece; None: the body ends with the connection."""
        self._chunked = False
        self._ended = True

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to the host of an http:// URL."""
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
                sock = await _connected(found)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise Lost(f"{type(error).__name__}: {error}"[:300]) from error
        return cls(sock, parts.netloc.rpartition("@")[2])

    def close(self) -> None:
        """Close; a second call does nothing."""
        self.idle = False
        self._sock.close()

    async def get(self, target: str, headers: dict[str, str], silence_s: float) -> None:
        """Ask for a path and read the answer's head: then `status` and `headers` (names in lower case) are set."""
        self.idle = False
        lines = {"Host": self._host, "Accept-Encoding": "identity", **headers}
        text = f"GET {target} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        try:
            async with asyncio.timeout(silence_s):
                await asyncio.get_running_loop().sock_sendall(self._sock, text.encode("latin-1"))
        except OSError as error:
            raise Ended(f"{type(error).__name__}: {error}"[:300]) from error
        head = (await self._until(b"\r\n\r\n", MAX_HEAD_BYTES, silence_s)).decode("latin-1").split("\r\n")
        version, _, rest = head[0].partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit():
            raise Lost(f"not an HTTP answer: {head[0][:60]!r}")
        self.status = int(rest[:3])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])}
        self._frame_body()

    def _frame_body(self) -> None:
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self._ended, self._left = False, None
        length = self.headers.get("content-length", "")
        if self.status in (204, 304) or self._chunked:
            self._left = 0
        elif length:
            if not (length.isascii() and length.isdigit() and len(length) <= 18):
                raise Lost(f"answered with a length of {length[:40]!r}")
            self._left = int(length)
        if not self._chunked and self._left == 0:
            self._finished()

    async def read(self, into: memoryview, silence_s: float) -> int:
        """Fill a buffer from the body; fewer bytes than it holds only when the body ends before."""
        return await self.read_some(into, len(into), silence_s)

    async def read_some(self, into: memoryview, need: int, silence_s: float) -> int:
        """Read at least `need` bytes of the body, and what is there beyond as far as it fits into the buffer.

        Fewer only when the body ends before.
        """
        got = 0
        while got < need:
            if self._left == 0 and not await self._next_chunk(silence_s):
                break
            room = len(into) - got if self._left is None else min(len(into) - got, self._left)
            count = self._take(into[got : got + room])
            if count == 0:
                due = min(need - got, room, WAKE_BYTES)
                count = await self._receive(into[got : got + room], silence_s, low_water=due)
                if count == 0:
                    if self._left is not None:
                        raise Ended("the connection ended within an answer")
                    self._ended = True
                    break
            got += count
            if self._left is not None:
                self._left -= count
                if self._left == 0 and not self._chunked:
                    self._finished()
        return got

    async def _next_chunk(self, silence_s: float) -> bool:
        """Go to the next piece of a chunked body; False at the body's end."""
        if self._ended or not self._chunked:
            return False
        line = await self._until(b"\r\n", 100, silence_s)
        if not line:  # the line break after a piece
            line = await self._until(b"\r\n", 100, silence_s)
        size = line.partition(b";")[0].strip()
        try:
            self._left = int(size, 16) if len(size) <= 8 and not size.startswith((b"-", b"+")) else -1
        except ValueError:
            self._left = -1
        if self._left < 0:
            raise Lost(f"not the size of a chunk: {line[:40]!r}")
        if self._left:
            return True
        while await self._until(b"\r\n", MAX_HEAD_BYTES, silence_s):
            pass
        self._finished()
        return False

    def _finished(self) -> None:
        self._ended = True
        self.idle = self.headers.get("connection", "").lower() != "close"

    def _take(self, into: memoryview) -> int:
        """Move what is buffered."""
        count = min(len(into), self._end - self._begin)
        into[:count] = memoryview(self._buffer)[self._begin : self._begin + count]
        self._begin += count
        return count

    async def _until(self, mark: bytes, limit: int, silence_s: float) -> bytes:
        """The bytes up to a mark, which is taken and not returned."""
        line = bytearray()
        while True:
            start = max(0, len(line) - len(mark) + 1)
            if self._begin == self._end:
                self._begin, self._end = 0, await self._receive(memoryview(self._buffer), silence_s, low_water=1)
                if self._end == 0:
                    raise Ended("the connection ended within an answer")
            line += memoryview(self._buffer)[self._begin : self._end]
            at = line.find(mark, start)
            if at >= 0:
                self._begin = self._end - (len(line) - at - len(mark))
                return bytes(line[:at])
            self._begin = self._end
            if len(line) > limit:
                raise Lost(f"more than {limit} bytes of header")

    async def _receive(self, into: memoryview, silence_s: float, *, low_water: int) -> int:
        """Read once, as soon as `low_water` bytes are there or the connection ended (0)."""
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        there, since = 0, time.monotonic()
        while True:
            try:
                return self._sock.recv_into(into)
            except BlockingIOError:
                pass
            except OSError as error:
                raise Ended(f"{type(error).__name__}: {error}"[:300]) from error
            if not await self._readable(min(silence_s, LOOK_S)):
                # Below the low-water mark bytes come without waking us: slow is not silent, but old bytes are no news.
                found = self._unread()
                if found > there:
                    there, since = found, time.monotonic()
                elif time.monotonic() - since >= silence_s:
                    raise Lost(f"silent for {silence_s:g} s")

    async def _readable(self, timeout_s: float) -> bool:
        """Wait until the low-water mark is reached, or the connection has ended; False if not within `timeout_s`.

        Nothing is read here: a timeout that cancels a read in the moment in which it succeeds would lose what it read.
        """
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(self._sock, _settle, readable, True)
        timer = loop.call_later(timeout_s, _settle, readable, False)
        try:
            return await readable
        finally:
            timer.cancel()
            loop.remove_reader(self._sock)

    def _unread(self) -> int:
        """Bytes that the kernel holds for us."""
        count = fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4))
        return int.from_bytes(count, sys.byteorder)


async def _connected(addresses: Sequence[tuple[Any, ...]]) -> socket.socket:
    """A socket that is connected to the first of a host's addresses that takes it; each has an equal share of the time.

    Raises OSError: the last one's.
    """
    failure = OSError("its name has no address")
    for family, kind, protocol, _, address in addresses:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(CONNECT_S / len(addresses)):
                await asyncio.get_running_loop().sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            # Cancelled too, nobody else knows this socket: it is closed, and the error goes on.
            sock.close()
            raise
    raise failure


def _settle(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)
