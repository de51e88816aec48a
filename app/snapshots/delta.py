"""Lossless delta between two payloads of 16-bit elements: which elements changed, and by what.

Invariant: `apply(base, encode(base, new)) == new`, bit for bit; a delta applied to another base, or altered on the way,
raises IntegrityError and yields nothing. Both directions work block by block: whatever the payload's size, they hold no
more than a few times BLOCK_BYTES.

Form, little-endian: MAGIC, u64 payload bytes, u32 bytes of a block of the payload, 32 bytes blake3 of the base, 32 of
the new payload. Then per block u32 changed elements, u32 and u32 bytes of the two zstd streams that follow. The first
holds the gaps (u32: index in the block minus the index before it minus 1; the first: the index itself), the second the
steps (u16: new bits minus old bits, modulo 2¹⁶), both in planes, all lowest bytes first. Under a small learning rate
nearly every step is one up or down, so that it takes a bit or two where the new bits would take sixteen.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from app.protocol.errors import IntegrityError

MAGIC = b"E2DELTA2"
HEAD = struct.Struct("<8sQI32s32s")
BLOCK_HEAD = struct.Struct("<III")
ELEMENT_BYTES = 2
PAYS_BELOW = 0.7
"""Share of the full size from which on a delta isn't worth the time that applying it takes."""
HOPELESS_FROM, HOPELESS_SHARE = 0.25, 0.9
"""When so much of the payload is encoded and the delta has this share of it, the rest isn't tried."""
BLOCK_BYTES = 8 * 1024 * 1024
"""Held by encoding and applying: at most 16 times this, if every element changes; about twice this otherwise."""
MAX_BLOCK_BYTES = 64 * 1024 * 1024
WORDS = 1 << 17
"""Words compared at once: small enough for the processor's cache."""
GAP_BYTES = 4
PER_WORD = 4
"""Elements in the words that are compared first."""

Buffer = bytes | bytearray | memoryview
Elements = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]

_ZSTD = pa.Codec("zstd", compression_level=1)


class Readable(Protocol):
    """A file, or memory that is read like one."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...

    def readinto(self, into: memoryview, /) -> int | None:
        """Fill a buffer; how many bytes, 0 or None at the end."""
        ...


class Memory:
    """Reads memory in order, without a copy of all of it as BytesIO makes one."""

    def __init__(self, data: Buffer) -> None:
        self._left = memoryview(data).cast("B")

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes."""
        taken, self._left = self._left[:size], self._left[size:]
        return bytes(taken)

    def readinto(self, into: memoryview, /) -> int:
        """Fill a buffer with the next bytes."""
        count = min(len(into), len(self._left))
        into[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


@dataclass(frozen=True, slots=True)
class Encoded:
    """What encoding came to. `share`: size of the delta over that of the payload, of the part that was encoded."""

    pays: bool
    share: float
    changed: int
    """Elements that differ, in the part that was encoded."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a delta."""

    payload_bytes: int
    block_bytes: int
    base_hash: bytes
    new_hash: bytes


def write(base: Readable, new: Readable, out: BinaryIO, *, size: int, base_hash: bytes, new_hash: bytes) -> Encoded:
    """Write the delta between two payloads of `size` bytes, read in order; the hashes are taken as given.

    What was written is of no use unless the result `pays`.
    """
    if size == 0 or size % ELEMENT_BYTES:
        return Encoded(pays=False, share=1.0, changed=0)
    written = out.write(HEAD.pack(MAGIC, size, BLOCK_BYTES, base_hash, new_hash))
    # The same memory for each block: fresh one would cost a page fault per page.
    before, after = bytearray(min(BLOCK_BYTES, size)), bytearray(min(BLOCK_BYTES, size))
    changed = covered = 0
    while covered < size:
        count, block = _encode_block(_elements(base, before, size - covered), _elements(new, after, size - covered))
        written += out.write(block)
        changed += count
        covered = min(size, covered + BLOCK_BYTES)
        hopeless = covered >= HOPELESS_FROM * size and written >= HOPELESS_SHARE * covered
        if hopeless or written >= PAYS_BELOW * size:
            return Encoded(pays=False, share=written / covered, changed=changed)
    return Encoded(pays=True, share=written / size, changed=changed)


def rebuild(base: Readable, delta: Readable, out: BinaryIO, *, size: int) -> str:
    """Write the payload that a delta makes of a base of `size` bytes; returns its blake3 (hex).

    Raises IntegrityError if the delta is damaged, or if what comes out hasn't the hash that the delta names, which is
    so too when the base is another one.
    """
    head = read_head(delta)
    if size != head.payload_bytes:
        raise IntegrityError(f"the delta is for a payload of {head.payload_bytes} bytes; the base has {size}")
    hasher, done = blake3(), 0
    block = bytearray(min(head.block_bytes, size))
    while done < size:
        elements = _elements(base, block, size - done)
        _apply_block(elements, delta)
        changed = memoryview(block)[: elements.nbytes]
        hasher.update(changed)
        out.write(changed)
        done += len(changed)
    if delta.read(1):
        raise IntegrityError("there are bytes after the delta's last block")
    if hasher.digest() != head.new_hash:
        raise IntegrityError("the payload that the delta gives doesn't have the delta's hash")
    return hasher.hexdigest()


def encode(base: Buffer, new: Buffer) -> bytes | None:
    """The delta that makes `new` of `base`, in memory; None when the whole of `new` is the better thing to send."""
    old_bits, new_bits = memoryview(base).cast("B"), memoryview(new).cast("B")
    if len(old_bits) != len(new_bits):
        return None
    out = io.BytesIO()
    made = write(
        Memory(old_bits), Memory(new_bits), out,
        size=len(new_bits), base_hash=blake3(old_bits).digest(), new_hash=blake3(new_bits).digest(),
    )  # fmt: skip
    return out.getvalue() if made.pays else None


def apply(base: Buffer, delta: Buffer) -> bytes:
    """The new payload, in memory. IntegrityError if the delta is damaged, or was made against another base.

    A payload that has the new hash already is returned as it is.
    """
    bits = memoryview(base).cast("B")
    head = read_head(Memory(delta))
    found = blake3(bits).digest()
    if found == head.new_hash and len(bits) == head.payload_bytes:
        return bytes(bits)
    if found != head.base_hash and len(bits) == head.payload_bytes:
        raise IntegrityError("the delta was made against another base: fetch the version in full")
    out = io.BytesIO()
    rebuild(Memory(bits), Memory(delta), out, size=len(bits))
    return out.getvalue()


def read_head(delta: Readable) -> Head:
    """The head of a delta, from where the file stands. Raises IntegrityError."""
    packed = delta.read(HEAD.size)
    if len(packed) < HEAD.size:
        raise IntegrityError(f"a delta of {len(packed)} bytes has no header")
    magic, size, block_bytes, base_hash, new_hash = HEAD.unpack(packed)
    if magic != MAGIC:
        raise IntegrityError("this is not a delta of a known form")
    if size % ELEMENT_BYTES or block_bytes % ELEMENT_BYTES or not 0 < block_bytes <= MAX_BLOCK_BYTES:
        raise IntegrityError(f"a delta in blocks of {block_bytes} bytes of a payload of {size} can't be")
    return Head(size, block_bytes, base_hash, new_hash)


def _encode_block(before: Elements, after: Elements) -> tuple[int, bytes]:
    """Number of changed elements, and the block of the delta."""
    changed = _changed(before, after)
    if not len(changed):
        return 0, BLOCK_HEAD.pack(0, 0, 0)
    gaps = np.diff(changed, prepend=-1) - 1
    steps = after[changed] - before[changed]
    where: bytes = _ZSTD.compress(_planes(gaps.astype("<u4"), GAP_BYTES), asbytes=True)
    what: bytes = _ZSTD.compress(_planes(steps.astype("<u2"), ELEMENT_BYTES), asbytes=True)
    return len(changed), BLOCK_HEAD.pack(len(changed), len(where), len(what)) + where + what


def _apply_block(elements: Elements, delta: Readable) -> None:
    """Take the next block off the delta and change the elements by it."""
    packed = delta.read(BLOCK_HEAD.size)
    if len(packed) < BLOCK_HEAD.size:
        raise IntegrityError("the delta is cut off")
    count, where_bytes, what_bytes = BLOCK_HEAD.unpack(packed)
    if count > len(elements):
        raise IntegrityError(f"the delta changes {count} of {len(elements)} elements of a block")
    if not count:
        if where_bytes or what_bytes:
            raise IntegrityError("the delta has data for a block that it doesn't change")
        return
    gaps = _unplanes(_stream(delta, where_bytes, count * GAP_BYTES), GAP_BYTES)
    steps = _unplanes(_stream(delta, what_bytes, count * ELEMENT_BYTES), ELEMENT_BYTES)
    indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if indices[-1] >= len(elements):
        raise IntegrityError("the delta changes elements that the payload doesn't have")
    elements[indices] += steps


def _stream(delta: Readable, packed_bytes: int, size: int) -> bytes:
    """The next zstd stream of a delta, which must hold exactly `size` bytes."""
    # The most that zstd makes of incompressible data; a stream that claims more isn't read at all.
    if packed_bytes > size + size // 128 + 1024:
        raise IntegrityError("a stream of the delta is longer than it can be")
    packed = delta.read(packed_bytes)
    if len(packed) < packed_bytes:
        raise IntegrityError("the delta is cut off")
    try:
        data: bytes = _ZSTD.decompress(pa.py_buffer(packed), decompressed_size=size, asbytes=True)
    except (OSError, ValueError) as error:  # what pyarrow raises for damaged data
        raise IntegrityError("the delta is damaged: it can't be decompressed") from error
    if len(data) != size:
        raise IntegrityError("the delta is damaged: a stream has another length")
    return data


def _planes(numbers: npt.NDArray[np.generic], width: int) -> bytes:
    """All lowest bytes first, then all second ones, and so on."""
    return numbers.view(np.uint8).reshape(-1, width).T.tobytes()


def _unplanes(planes: bytes, width: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    return np.frombuffer(planes, np.uint8).reshape(width, -1).T.copy().view(f"<u{width}").reshape(-1)


def _changed(before: Elements, after: Elements) -> Indices:
    """Indices of the elements that differ. Compares words, then within words."""
    words = len(after) // PER_WORD
    old, new = (bits[: words * PER_WORD].view(np.uint64) for bits in (before, after))
    found: list[Indices] = []
    for at in range(0, words, WORDS):
        word = np.flatnonzero(old[at : at + WORDS] != new[at : at + WORDS]) + at
        index = (word[:, None] * PER_WORD + np.arange(PER_WORD)).reshape(-1)
        found.append(index[before[index] != after[index]])
    tail = np.arange(words * PER_WORD, len(after))
    found.append(tail[before[tail] != after[tail]])
    return np.concatenate(found)


def _elements(file: Readable, block: bytearray, left: int) -> Elements:
    """Fill a block, or its first `left` bytes, from a file, and see it as elements. IntegrityError if it's shorter."""
    view, got = memoryview(block)[:left], 0
    while got < len(view):
        count = file.readinto(view[got:])
        if not count:
            raise IntegrityError("a payload is shorter than it should be")
        got += count
    return np.frombuffer(view, dtype="<u2")
