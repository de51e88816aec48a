"""The files of a version's folder, and writing that survives a power cut.

Invariant: what `write_synced` and then `sync_folder` returned from is on disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from app.snapshots.manifest import MAX_DOCUMENT_BYTES

PAYLOAD = "payload.safetensors"
DOCUMENT = "manifest.json"


def read_document(folder: Path) -> bytes:
    """The signed document in a folder; empty (which verifies as nothing) when there is none."""
    try:
        with (folder / DOCUMENT).open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        return b""


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and put it on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put a folder's names on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
