"""The object store: a folder or an S3-compatible service behind one small interface.

Invariant: an object is whole or absent (a writer that dies leaves nothing behind), and a key never leaves its prefix.
All calls block; call them from a thread in asynchronous code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.protocol.errors import BadInput, TooLarge

CHECK_KEY = "echo2-check"
"""What `check` writes and reads."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Key relative to the store's prefix, and size in bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class PresignedPut:
    """A URL for exactly one PUT of at most `max_bytes`, with the headers that must be sent."""

    url: str
    headers: dict[str, str]


class ObjectStore(Protocol):
    """What the service needs of a store. Missing keys raise NotFound."""

    def check(self) -> None:
        """Write, or read again, a small object. Raises Forbidden or Unavailable whose text names the setting to look
        at; within seconds."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store bytes, replacing what was there."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Store a file (multipart where the store wants it)."""
        ...

    def get(self, key: str, most: int | None = None) -> bytes:
        """All bytes of an object. One that has more than `most` is not read: raises TooLarge."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Put an object into a file, a block at a time."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Size, or None if there is no such object."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Remove; absent is fine."""
        ...

    def presign_get(self, key: str, expires_s: int) -> str:
        """URL that lets anyone GET this object for `expires_s` seconds."""
        ...

    def presign_put(self, key: str, expires_s: int, max_bytes: int) -> PresignedPut:
        """URL that lets anyone PUT this object once or again for `expires_s` seconds."""
        ...


def at_most(key: str, size: int, most: int | None) -> None:
    """Raises TooLarge for an object that is larger than its reader expects."""
    if most is not None and size > most:
        raise TooLarge(f"{key} has {size} bytes; at most {most} are read")


def validate_key(key: str) -> str:
    """The key if it is safe to use as a relative path. Raises BadInput otherwise."""
    parts = key.split("/")
    if not key or len(key) > 900 or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
        raise BadInput(f"{key[:80]!r} is not a valid object key")
    return key
