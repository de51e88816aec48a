"""Trajectory files that were downloaded, so that a learner that starts again need not fetch them again.

Invariant: what `get` returns has the hash that was asked for; the files together are no larger than the limit; a cache
that can't be read or written costs a download, never a rollout.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

log = logging.getLogger(__name__)


class FileCache:
    """Files by their hash in one folder; the ones used longest ago go first. For one thread of one process."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes

    def get(self, digest: str, size: int) -> bytes | None:
        """The file with this blake3 (hex) and size in bytes; None if it is not here."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
            if len(data) == size and blake3(data).hexdigest() == digest:
                os.utime(path)
                return data
            log.warning("the cached file %s is damaged and fetched again", path)
            path.unlink()
        except OSError:
            return None
        return None

    def put(self, digest: str, data: bytes) -> None:
        """Keep a file whose hash was checked. A disk that refuses is logged."""
        if len(data) > self._limit:
            return
        part = self._folder / f".part-{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.rename(self._path(digest))
            self._shrink()
        except OSError as error:
            log.warning("the trajectory cache %s can't be written: %s", self._folder, error)
            with suppress(OSError):
                part.unlink()

    def _path(self, digest: str) -> Path:
        return self._folder / f"{Path(digest).name}.parquet"

    def _shrink(self) -> None:
        files = sorted(((p.stat().st_mtime_ns, p.stat().st_size, p) for p in self._folder.iterdir()), reverse=True)
        total = 0
        for _, size, path in files:
            total += size
            if total > self._limit:
                path.unlink(missing_ok=True)
