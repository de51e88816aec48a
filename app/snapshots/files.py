"""The files of a version's folder, and writing that survives a power cut.

Invariant: what `write_synced` and then `sync_folder` returned from is on disk.
"""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO

from app.snapshots.manifest import MAX_DOCUMENT_BYTES, Kind

PAYLOAD = "payload.safetensors"
DELTA = "payload.delta"
DOCUMENT = "manifest.json"
WHOLE_DOCUMENT = "version.json"
"""Beside a delta: the signed document of the version that it leads to."""


def payload_name(kind: Kind) -> str:
    """The file that holds the payload of a version, or a delta."""
    return DELTA if kind == "delta" else PAYLOAD


def delta_folder(root: Path, version: int) -> Path:
    """Where the complete delta that leads to a version lies."""
    return root / f"{version}.delta"


def read_document(folder: Path, name: str = DOCUMENT) -> bytes:
    """The signed document in a folder; empty (which verifies as nothing) when there is none."""
    try:
        with (folder / name).open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        return b""


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and put it on disk."""
    with path.open("wb") as file:
        file.write(data)
        sync(file)


def sync(file: BinaryIO | BufferedWriter) -> None:
    """Put what was written to a file on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put a folder's names on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
