"""Lossless delta between two payloads of 16-bit elements: which elements changed, and by what.

Invariant: `apply(base, encode(base, new)) == new`, bit for bit; a delta applied to another base, or altered on the way,
raises IntegrityError and yields nothing; one that was applied already changes nothing.

Form, little-endian: MAGIC, u64 payload bytes, 32 bytes blake3 of the base, 32 of the new payload, u64 changed elements,
u64 bytes of the first of two zstd streams that follow. The first holds the gaps (u32: index minus the index before it
minus 1; the first: the index itself), the second the steps (u16: new bits minus old bits, modulo 2¹⁶), both in planes,
all lowest bytes first. Under a small learning rate nearly every step is one up or down, so that it takes a bit or two
where the new bits would take sixteen. Where lengths differ or a delta wouldn't pay, `encode` returns None: send the
whole.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from app.protocol.errors import IntegrityError

MAGIC = b"E2DELTA1"
HEAD = struct.Struct("<8sQ32s32sQQ")
ELEMENT_BYTES = 2
PAYS_BELOW = 0.7
"""Share of the full size from which on a delta isn't worth the time that applying it takes."""
BLOCK = 1 << 17
"""Words compared at once: small enough for the processor's cache."""
GAP_BYTES = 4
PER_WORD = 4
"""Elements in the words that are compared first."""

Buffer = bytes | bytearray | memoryview
Elements = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]

_ZSTD = pa.Codec("zstd", compression_level=1)


def encode(base: Buffer, new: Buffer) -> bytes | None:
    """The delta that makes `new` of `base`; None when the whole of `new` is the better thing to send."""
    old_bits, new_bits = memoryview(base).cast("B"), memoryview(new).cast("B")
    size = len(new_bits)
    if size != len(old_bits) or size == 0 or size % ELEMENT_BYTES:
        return None
    before, after = _elements(old_bits), _elements(new_bits)
    changed = _changed(before, after, int(len(after) * PAYS_BELOW))
    if changed is None:
        return None
    gaps = np.diff(changed, prepend=-1) - 1
    if len(gaps) and gaps.max() >= 1 << (8 * GAP_BYTES):
        return None
    where: bytes = _ZSTD.compress(_planes(gaps.astype("<u4"), GAP_BYTES), asbytes=True)
    steps = after[changed] - before[changed]
    what: bytes = _ZSTD.compress(_planes(steps.astype("<u2"), ELEMENT_BYTES), asbytes=True)
    if HEAD.size + len(where) + len(what) >= PAYS_BELOW * size:
        return None
    head = HEAD.pack(MAGIC, size, blake3(old_bits).digest(), blake3(new_bits).digest(), len(changed), len(where))
    return head + where + what


def apply(base: Buffer, delta: Buffer) -> bytearray:
    """The new payload. IntegrityError if the delta is damaged, or was made against another base."""
    old_bits = memoryview(base).cast("B")
    result = bytearray(old_bits)
    apply_in_place(result, delta)
    return result


def apply_in_place(payload: bytearray | memoryview, delta: Buffer) -> None:
    """Turn a base into the new payload in its own memory.

    IntegrityError if the delta is damaged or of another base; then the memory holds neither of the two. One that was
    applied already is left as it is.
    """
    bits, packed = memoryview(payload).cast("B"), memoryview(delta).cast("B")
    size, base_hash, new_hash, count, where_bytes = _head(packed)
    if size != len(bits):
        raise IntegrityError(f"the delta is for a payload of {size} bytes; the base has {len(bits)}")
    found = blake3(bits).digest()
    if found == new_hash:
        return
    if found != base_hash:
        raise IntegrityError("the delta was made against another base: fetch the version in full")
    if not 0 <= count <= size // ELEMENT_BYTES:
        raise IntegrityError(f"the delta changes {count} of {size // ELEMENT_BYTES} elements")
    gaps = _unplanes(_decompress(packed[HEAD.size : HEAD.size + where_bytes], count * GAP_BYTES), GAP_BYTES)
    steps = _unplanes(_decompress(packed[HEAD.size + where_bytes :], count * ELEMENT_BYTES), ELEMENT_BYTES)
    indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and indices[-1] >= size // ELEMENT_BYTES:
        raise IntegrityError("the delta changes elements that the payload doesn't have")
    _elements(bits)[indices] += steps
    if blake3(bits).digest() != new_hash:
        raise IntegrityError("the payload that the delta gives doesn't have the delta's hash")


def _planes(numbers: npt.NDArray[np.generic], width: int) -> bytes:
    """All lowest bytes first, then all second ones, and so on."""
    return numbers.view(np.uint8).reshape(-1, width).T.tobytes()


def _unplanes(planes: bytes, width: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    return np.frombuffer(planes, np.uint8).reshape(width, -1).T.copy().view(f"<u{width}").reshape(-1)


def _elements(bits: memoryview) -> Elements:
    return np.frombuffer(bits, dtype="<u2")


def _changed(before: Elements, after: Elements, most: int) -> Indices | None:
    """Indices of the elements that differ; None when there are more than `most`. Compares words, then within words."""
    words = len(after) // PER_WORD
    old, new = (bits[: words * PER_WORD].view(np.uint64) for bits in (before, after))
    found: list[Indices] = []
    count = 0
    for at in range(0, words, BLOCK):
        word = np.flatnonzero(old[at : at + BLOCK] != new[at : at + BLOCK]) + at
        index = (word[:, None] * PER_WORD + np.arange(PER_WORD)).reshape(-1)
        found.append(index[before[index] != after[index]])
        count += len(found[-1])
        if count > most:
            return None
    tail = np.arange(words * PER_WORD, len(after))
    found.append(tail[before[tail] != after[tail]])
    return np.concatenate(found)


def _head(packed: memoryview) -> tuple[int, bytes, bytes, int, int]:
    if len(packed) < HEAD.size:
        raise IntegrityError(f"a delta of {len(packed)} bytes has no header")
    magic, size, base_hash, new_hash, count, where_bytes = HEAD.unpack_from(packed)
    if magic != MAGIC:
        raise IntegrityError("this is not a delta of a known form")
    if where_bytes > len(packed) - HEAD.size:
        raise IntegrityError("the delta is cut off")
    return size, base_hash, new_hash, count, where_bytes


def _decompress(data: memoryview, size: int) -> bytes:
    """Exactly `size` bytes out of a zstd stream."""
    try:
        return bytes(_ZSTD.decompress(pa.py_buffer(data), decompressed_size=size, asbytes=True))
    except (OSError, ValueError) as error:  # what pyarrow raises for damaged data
        raise IntegrityError("the delta is damaged: it can't be decompressed") from error
