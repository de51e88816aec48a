"""The wire form of a stream: frames of [u32 leaf index][u32 length][bytes], big-endian.

Invariant: a parser never buffers more than one leaf of the length that the manifest promises: a header that promises
anything else is refused before its body is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from app.protocol.errors import IntegrityError
from app.snapshots.manifest import Manifest

HEADER = struct.Struct(">II")
KEEP_ALIVE = HEADER.pack(0xFFFFFFFF, 0)
"""Sent by a relay that itself waits for its upstream: alive, but starved."""
KEEP_ALIVES = 256
"""So many may be within a stream; those that weren't needed come behind the last leaf, so that its length is known."""
PADDING = KEEP_ALIVE * KEEP_ALIVES
PADDING_BYTES = len(PADDING)


class LeafParser:
    """Cuts received bytes into the leaves of a manifest, in order, beginning with leaf `first`.

    With `framed` the bytes are frames (a relay's stream), otherwise bare payload (a chunk of the object store).
    """

    def __init__(self, manifest: Manifest, first: int, *, framed: bool) -> None:
        self._manifest = manifest
        self._next = first
        self._framed = framed
        self._in_leaf = not framed
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The leaves that are whole now. Raises IntegrityError at the first header that isn't the next leaf's."""
        self._buffer += data
        while True:
            if not self._in_leaf and not self._header():
                return
            if self._in_leaf:
                if self._next >= self._manifest.leaves:
                    if self._buffer:
                        raise IntegrityError("bytes after the last leaf")
                    return
                size = self._manifest.leaf_size(self._next)
                if len(self._buffer) < size:
                    return
                leaf = bytes(self._buffer[:size])
                del self._buffer[:size]
                self._in_leaf = not self._framed
                self._next += 1
                yield self._next - 1, leaf

    def _header(self) -> bool:
        """Take a header off the buffer; False when there is none."""
        if len(self._buffer) < HEADER.size:
            return False
        head = bytes(self._buffer[: HEADER.size])
        del self._buffer[: HEADER.size]
        self._in_leaf = announces_leaf(self._manifest, self._next, head)
        return True


def announces_leaf(manifest: Manifest, due: int, head: bytes) -> bool:
    """Whether leaf `due` follows; False for a keep-alive. Raises IntegrityError for any other header."""
    if head == KEEP_ALIVE:
        return False
    index, size = HEADER.unpack(head)
    if index != due or index >= manifest.leaves:
        raise IntegrityError(f"frame of leaf {index} where leaf {due} was due")
    if size != manifest.leaf_size(index):
        raise IntegrityError(f"frame of {size} bytes for leaf {index}, which has {manifest.leaf_size(index)}")
    return True


def frame(n: int, leaf: bytes) -> bytes:
    """One leaf as a frame."""
    return HEADER.pack(n, len(leaf)) + leaf


def stream_bytes(manifest: Manifest, first: int, end: int) -> int:
    """Length of a stream of the leaves `first` … `end` − 1, with all the keep-alives that may be in it."""
    if first >= end:
        return PADDING_BYTES
    payload = min(end * manifest.leaf_bytes, manifest.payload_bytes) - first * manifest.leaf_bytes
    return (end - first) * HEADER.size + payload + PADDING_BYTES
