"""Keeping a sender under its link: by the kernel's pacing of each socket where it can (Linux), else by a token bucket.

The bucket is the worse of the two. What gathers in a socket while the window is small leaves in one burst, which the
queue before the link can't hold; and a forwarder whose leaves come unevenly can't make up for the time it had none.

Invariant (bucket): over any span the bytes granted are at most rate × span + burst + one piece. Callers are served in
the order of asking, which shares the rate equally among streams that send equal pieces.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

HEADROOM = 0.985
"""Share of the link that is used: a sender a little under the link keeps queues short and avoids losses."""
PACKETS = 1500 / 1448
"""Bytes on the link per byte sent: TCP/IP headers with timestamps, packets of 1500 bytes."""


class Pacer:
    """Hands out sending times. Not thread-safe: one event loop. `bytes_per_s` None means no limit."""

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        burst_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be more than 0 or None, not {bytes_per_s}")
        self._rate = bytes_per_s
        self._burst_s = burst_s
        self._clock = clock
        self._free_at = clock() - burst_s

    def reserve(self, count: int) -> float:
        """Book `count` bytes and return the seconds to wait before sending them (0 when they fit now)."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        start = max(self._free_at, now - self._burst_s)
        self._free_at = start + count / self._rate
        return max(0.0, start - now)


SO_MAX_PACING_RATE = 47
"""Of Linux; not in Python's socket module."""
LARGEST_RATE = 2**31 - 1
TCP_INFO_BYTES = 60
TCP_INFO = struct.Struct("=24xI28xI")
"""Of Linux's struct tcp_info: segments unacknowledged, and milliseconds since anything was acknowledged."""
STUCK_MS = 2000
"""A socket whose other side hasn't acknowledged anything for so long needs no share of the link."""


class Shares:
    """Holds every sending socket to an equal share of a link's rate, as far as the system can. One event loop."""

    def __init__(self, link_bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = None if link_bytes_per_s is None else link_bytes_per_s / PACKETS
        self._clock = clock
        self._sending: list[tuple[socket.socket, float, float]] = []
        """Socket, share of its part of the link, and since when it sends."""

    @contextlib.contextmanager
    def of(self, sock: socket.socket | None, *, origin: bool) -> Iterator[bool]:
        """Within this context the socket sends and counts. False: the system can't hold it to a rate.

        An origin has all it sends and stays under the link (HEADROOM). A forwarder is held by what comes in, and needs
        the rest of the link to make up for each moment that nothing came, or every hop would add to the delay.
        """
        if sock is None or self._rate is None or sys.platform != "linux":
            yield self._rate is None
            return
        sender = (sock, HEADROOM if origin else 1.0, self._clock())
        self._sending.append(sender)
        self._divide()
        try:
            yield True
        finally:
            # What is still in its socket goes on at the rate that it has.
            self._sending.remove(sender)
            self._divide()

    def _divide(self) -> None:
        """A child that was cut off is missed by the kernel after minutes only: its share is for who comes instead."""
        assert self._rate is not None
        now = self._clock()
        # After a pause nothing has been acknowledged for long either: a stream that is young is not stuck.
        alive = [s for s in self._sending if now - s[2] < STUCK_MS / 1000 or not _is_stuck(s[0])]
        for sock, share, _ in alive:
            _pace(sock, max(1, min(LARGEST_RATE, int(self._rate * share / len(alive)))))


def stuck(tcp_info: bytes) -> bool:
    """Whether what was sent has not been acknowledged for long."""
    unacknowledged, since_ms = TCP_INFO.unpack_from(tcp_info)
    return bool(unacknowledged) and since_ms >= STUCK_MS


def _is_stuck(sock: socket.socket) -> bool:
    # The connection may be gone by now; then it takes nothing either.
    try:
        return stuck(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    except OSError:
        return True


def _pace(sock: socket.socket, bytes_per_s: int) -> None:
    # The connection may be gone by now; then there is nothing to pace.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
