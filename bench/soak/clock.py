"""Time that two processes share and that moves only when it is told to.

Invariant: a step is one aligned store of eight bytes, so whoever is killed in the middle leaves a clock that reads.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

NS = 1_000_000_000


class SharedClock:
    """Nanoseconds in a file. Implements `providers.marketplace.clock.Clock`."""

    def __init__(self, path: Path, start_s: int | None = None) -> None:
        if start_s is not None:
            path.write_bytes(struct.pack("<q", start_s * NS))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 8)

    def now_ns(self) -> int:
        """Now."""
        return int(struct.unpack_from("<q", self._map)[0])

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self.now_ns() / NS

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        struct.pack_into("<q", self._map, 0, self.now_ns() + round(seconds * NS))
