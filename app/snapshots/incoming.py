"""Snapshots on disk: complete ones, one that is arriving, and readers of either.

Invariant: a leaf that an Incoming counts in `have` was hashed against the signed manifest after it was received or, on
resumption, after it was read back from disk; a Reader yields only such leaves.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

from app.protocol.errors import Conflict, IntegrityError
from app.snapshots.files import payload_name
from app.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete version on local disk whose payload had the manifest's hash when it was opened."""

    version: int
    manifest: Manifest
    document: bytes
    payload_path: Path


class Incoming:
    """A version that is arriving, leaf by leaf in order. Thread-safe; made by `SnapshotStore.begin` only.

    `on_change` is called after every verified leaf and on closing, `on_complete(self)` once to put it into place; what
    that returns is called when the download is closed, and gives the version. `whole`: when a delta arrives, the signed
    document of the version that it leads to.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        document: bytes,
        *,
        on_change: Callable[[], None],
        on_complete: Callable[[Incoming], Callable[[], Snapshot]],
        whole: bytes = b"",
    ) -> None:
        self.manifest = manifest
        self.document = document
        self.whole = whole
        self.folder = folder
        self.path = folder / payload_name(manifest.kind)
        self._on_change = on_change
        self._on_complete = on_complete
        self._lock = threading.RLock()
        self._hasher = blake3()
        self._have = 0
        self._closed = False
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._resume()

    @property
    def version(self) -> int:
        """The version that arrives."""
        return self.manifest.version

    @property
    def have(self) -> int:
        """Verified leaves, contiguous from leaf 0."""
        return self._have

    @property
    def bytes_have(self) -> int:
        """Verified payload bytes."""
        return min(self._have * self.manifest.leaf_bytes, self.manifest.payload_bytes)

    @property
    def closed(self) -> bool:
        """Whether nothing more will arrive here (given up, or complete)."""
        return self._closed

    def write_leaf(self, n: int, data: bytes | bytearray | memoryview) -> None:
        """Verify and keep the next leaf.

        Raises IntegrityError when the length or the hash is wrong (nothing is kept) and Conflict when n is not the
        next leaf or the download is closed. OSError when the disk is full.
        """
        with self._lock:
            self._check_open()
            if n != self._have:
                raise Conflict(f"leaf {self._have} is next, not {n}")
            if n >= self.manifest.leaves:
                raise IntegrityError(
                    f"version {self.version} has {self.manifest.leaves} leaves; leaf {n} is none of it"
                )
            if len(data) != self.manifest.leaf_size(n):
                raise IntegrityError(f"leaf {n} has {len(data)} bytes, not {self.manifest.leaf_size(n)}")
            if blake3(data).hexdigest() != self.manifest.leaf_hashes[n]:
                raise IntegrityError(f"leaf {n} of version {self.version} does not have the manifest's hash")
            _write_all(self._fd, data, n * self.manifest.leaf_bytes)
            self._hasher.update(data)
            self._have = n + 1
        self._on_change()

    def complete(self) -> Snapshot:
        """All leaves are here: check the whole hash, put it on disk for good and rename it into place. Blocks.

        A delta is applied then. Raises Conflict when leaves are missing, IntegrityError when the whole hash differs
        (the download is removed) or the delta can't be applied.
        """
        with self._lock:
            self._check_open()
            if self._have != self.manifest.leaves:
                raise Conflict(f"{self._have} of {self.manifest.leaves} leaves of version {self.version} are here")
            if self._hasher.hexdigest() != self.manifest.payload_blake3:
                self.discard()
                raise IntegrityError(f"the payload of version {self.version} does not have the manifest's hash")
            os.fsync(self._fd)
            finish = self._on_complete(self)
            self._close()
        self._on_change()
        # Not under the lock: applying a delta may take a minute, and `close` must not wait for it.
        return finish()

    def close(self) -> None:
        """Give up for now: readers end, what was received stays on disk for resumption."""
        with self._lock:
            self._close()
        self._on_change()

    def discard(self) -> None:
        """Give up for good and remove what was received."""
        with self._lock:
            self._close()
            shutil.rmtree(self.folder, ignore_errors=True)
        self._on_change()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict(f"the download of version {self.version} is closed")

    def _resume(self) -> None:
        """Count the leaves on disk that have the manifest's hash, up to the first that has not; cut off the rest."""
        for n in range(self.manifest.leaves):
            data = os.pread(self._fd, self.manifest.leaf_size(n), n * self.manifest.leaf_bytes)
            if len(data) != self.manifest.leaf_size(n) or blake3(data).hexdigest() != self.manifest.leaf_hashes[n]:
                break
            self._hasher.update(data)
            self._have = n + 1
        os.ftruncate(self._fd, self.bytes_have)


class Reader:
    """Reads verified leaves of one version, complete or arriving. Close it: an open reader keeps the version alive."""

    def __init__(
        self, path: Path, manifest: Manifest, incoming: Incoming | None, *, on_close: Callable[[], None]
    ) -> None:
        self.manifest = manifest
        self._incoming = incoming
        self._on_close = on_close
        # One open file for the whole life: it stays readable when the folder is renamed into place.
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def ready(self) -> int:
        """Leaves that can be read."""
        return self.manifest.leaves if self._incoming is None else self._incoming.have

    @property
    def over(self) -> bool:
        """Whether `ready` will not grow any more. Ask before `ready` when both matter."""
        return self._incoming is None or self._incoming.closed

    def read(self, n: int) -> bytes:
        """Leaf n. Raises Conflict if it isn't here (yet) and IntegrityError if the file got shorter."""
        if n >= self.ready or self._fd is None:
            raise Conflict(f"leaf {n} of version {self.manifest.version} is not here")
        data = os.pread(self._fd, self.manifest.leaf_size(n), n * self.manifest.leaf_bytes)
        if len(data) != self.manifest.leaf_size(n):
            raise IntegrityError(f"the payload of version {self.manifest.version} is shorter than its manifest says")
        return data

    def close(self) -> None:
        """Let go of the version; a second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
