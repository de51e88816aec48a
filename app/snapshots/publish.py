"""The learner's side of a version: what its manifest says, and the delta that leads to it from the version before.

Invariant: a delta is published only if it pays; whoever can't use it takes the version whole. Everything here blocks on
disk and processor: it belongs in the publisher's thread. Held in memory are a few blocks, whatever the payload's size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.snapshots.delta import PAYS_BELOW, write
from app.snapshots.deltas import DeltaFile
from app.snapshots.files import DOCUMENT, WHOLE_DOCUMENT, payload_name, sync, sync_folder, write_synced
from app.snapshots.incoming import Snapshot
from app.snapshots.manifest import AssetEntry, DeltaOf, Manifest, TensorEntry, kind_of, leaf_bytes_for, sign


@dataclass(frozen=True, slots=True)
class Sizes:
    """How payloads are cut: the least size of a leaf, and the size of a chunk."""

    leaf_bytes: int
    chunk_bytes: int

    def leaf(self, payload_bytes: int) -> int:
        """The leaf size for a payload."""
        return leaf_bytes_for(payload_bytes, self.leaf_bytes, self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class Publication:
    """A published version. `delta` None: `note` says why there is none. `share`: bytes of a delta over the full's."""

    snapshot: Snapshot
    delta: DeltaFile | None
    share: float | None
    note: str
    encode_s: float = 0.0
    """Seconds that the delta took."""


def describe(
    payload: Path,
    version: int,
    tensors: list[TensorEntry],
    assets: Sequence[AssetEntry],
    *,
    job_id: str,
    sizes: Sizes,
    at: datetime,
    quantisation: Literal["int8"] | None = None,
) -> Manifest:
    """The manifest of a payload file, which is read once. Assets that describe an adapter make its kind `adapter`."""
    leaf_bytes = sizes.leaf(payload.stat().st_size)
    whole, leaves = hash_leaves(payload, leaf_bytes)
    return Manifest(
        job_id=job_id,
        version=version,
        kind=kind_of(assets),
        payload_bytes=payload.stat().st_size,
        payload_blake3=whole,
        leaf_bytes=leaf_bytes,
        chunk_bytes=sizes.chunk_bytes,
        leaf_hashes=leaves,
        tensors=tensors,
        assets=list(assets),
        created_at=at,
        quantisation=quantisation,
    )


def hash_leaves(path: Path, leaf_bytes: int) -> tuple[str, list[str]]:
    """blake3 of a file, and of each of its leaves."""
    whole, leaves = blake3(), []
    with path.open("rb") as file:
        while data := file.read(leaf_bytes):
            whole.update(data)
            leaves.append(blake3(data).hexdigest())
    return whole.hexdigest(), leaves


@dataclass(frozen=True, slots=True)
class Made:
    """A delta in a folder that is to be put into place; `manifest` None when it doesn't pay."""

    manifest: Manifest | None
    document: bytes
    share: float | None
    note: str
    encode_s: float = 0.0


def make_delta(
    folder: Path, base: Snapshot | None, payload: Path, target: Manifest, whole: bytes, *, key: Ed25519PrivateKey,
    sizes: Sizes,
) -> Made:  # fmt: skip
    """Write the delta from `base` to `target`, whose payload and signed document (`whole`) are given, into `folder`."""
    if base is None:
        return Made(None, b"", None, "there is no version before it here")
    if base.manifest.tensors != target.tensors:
        return Made(None, b"", None, f"its tensors are not those of v{base.version}")
    began = time.perf_counter()
    folder.mkdir()
    path, of = folder / payload_name("delta"), base.manifest
    with base.payload_path.open("rb") as before, payload.open("rb") as after, path.open("wb") as out:
        encoded = write(
            before, after, out,
            size=target.payload_bytes, base_hash=bytes.fromhex(of.payload_blake3),
            new_hash=bytes.fromhex(target.payload_blake3),
        )  # fmt: skip
        if encoded.pays:
            sync(out)
    took = time.perf_counter() - began
    if not encoded.pays:
        note = f"the delta would be {encoded.share:.0%} of the full; below {PAYS_BELOW:.0%} it pays"
        return Made(None, b"", encoded.share, note, took)
    leaf_bytes = sizes.leaf(path.stat().st_size)
    found, leaves = hash_leaves(path, leaf_bytes)
    manifest = Manifest(
        job_id=target.job_id, version=target.version, kind="delta", base=base.version, codec="delta",
        payload_bytes=path.stat().st_size, payload_blake3=found, leaf_bytes=leaf_bytes,
        chunk_bytes=sizes.chunk_bytes, leaf_hashes=leaves, tensors=[], created_at=target.created_at,
        delta=DeltaOf(
            base_blake3=of.payload_blake3, result_bytes=target.payload_bytes, result_blake3=target.payload_blake3
        ),
    )  # fmt: skip
    document = sign(manifest, key)
    write_synced(folder / DOCUMENT, document)
    write_synced(folder / WHOLE_DOCUMENT, whole)
    sync_folder(folder)
    return Made(manifest, document, encoded.share, "", took)
