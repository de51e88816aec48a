"""Small file operations that survive a crash.

Invariant: what `write_durable` and `fsync_tree` return from is on disk; `exclusive` never waits for ever.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from app.protocol.errors import LearnerError

_POLL_S = 0.2


@contextmanager
def exclusive(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold a lock file; the kernel releases it when the process ends. Raises LearnerError after `timeout_s`."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LearnerError(f"another process has held {path} for {timeout_s:.0f} s") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def write_durable(path: Path, data: bytes) -> None:
    """Write a file and force it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Force one file, or the list of names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Force all files of a folder, the folder and its parent to disk."""
    for path in sorted(folder.rglob("*")):
        fsync_path(path)
    fsync_path(folder)
    fsync_path(folder.parent)


def hash_file(path: Path) -> str:
    """blake3 of a file, hex."""
    return blake3(max_threads=1).update_mmap(path).hexdigest() if path.stat().st_size else blake3(b"").hexdigest()
