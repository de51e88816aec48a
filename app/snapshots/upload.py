"""Snapshots and deltas into the object store.

Invariant: a manifest's presence in the store says that all that it names is there: it comes last. Idempotent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from app.snapshots.deltas import DeltaFile
from app.snapshots.incoming import Snapshot
from app.snapshots.manifest import Manifest


class ObjectSink(Protocol):
    """The part of an object store that uploads need."""

    def put(self, key: str, data: bytes) -> None:
        """Store bytes, replacing what was there."""
        ...


def upload(snapshot: Snapshot, objects: ObjectSink, prefix: str) -> None:
    """Put a snapshot under `{prefix}/{version}/`: `chunks/{n}`, and last `manifest.json`.

    Blocks. Raises what the store raises.
    """
    base = f"{prefix.rstrip('/')}/{snapshot.version}"
    _chunks(snapshot.payload_path, snapshot.manifest, objects, base)
    objects.put(f"{base}/manifest.json", snapshot.document)


def upload_delta(made: DeltaFile, objects: ObjectSink, prefix: str) -> None:
    """Put a delta under `{prefix}/{version}/delta/`: `chunks/{n}`, the version's document, last `manifest.json`.

    Blocks. Raises what the store raises.
    """
    base = f"{prefix.rstrip('/')}/{made.manifest.version}/delta"
    _chunks(made.path, made.manifest, objects, base)
    objects.put(f"{base}/version.json", made.whole)
    objects.put(f"{base}/manifest.json", made.document)


def _chunks(path: Path, manifest: Manifest, objects: ObjectSink, base: str) -> None:
    # Opened once: a newer version's arrival may remove the folder meanwhile.
    with path.open("rb") as file:
        for n in range(manifest.chunks):
            objects.put(f"{base}/chunks/{n}", file.read(manifest.chunk_bytes))
