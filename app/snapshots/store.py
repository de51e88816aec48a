"""Snapshots on local disk: `{version}/` complete, `{version}.part/` arriving, `*.new/` being written by the learner.

Invariant: a folder proves nothing. What `latest`, `get` and `open` return was hashed by this process, as it arrived or
when the store was opened; folders are renamed into place only when they are whole and on disk. A version that is being
read is never removed. Thread-safe; all methods block on disk, none on the network (except `upload`).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.protocol.base import utcnow
from app.protocol.errors import BadInput, Conflict, IntegrityError
from app.snapshots.changes import Changes
from app.snapshots.codec import encode_full
from app.snapshots.files import DOCUMENT, PAYLOAD, read_document, sync_folder, write_synced
from app.snapshots.incoming import Incoming, Reader, Snapshot
from app.snapshots.manifest import (
    CHUNK_BYTES,
    LEAF_BYTES,
    MAX_VERSION,
    AssetEntry,
    Manifest,
    TensorEntry,
    public_hex,
    sign,
    verify,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Incoming", "Reader", "Snapshot", "SnapshotStore", "upload"]

log = logging.getLogger(__name__)


class ObjectSink(Protocol):
    """The part of an object store that `upload` needs."""

    def put(self, key: str, data: bytes) -> None:
        """Store bytes, replacing what was there."""
        ...


class SnapshotStore:
    """The newest `keep` complete versions of one job, and the one that is arriving.

    An older version that is being read or is pinned stays until the first new version after that.

    Opening hashes every complete version found (seconds for large models: do it in a thread), removes those that are
    not what their manifest says, and keeps a half-received one for `begin` to verify.
    """

    def __init__(
        self,
        root: Path,
        *,
        job_id: str,
        public_key: str,
        keep: int = 2,
        leaf_bytes: int = LEAF_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], datetime] = utcnow,
    ) -> None:
        if keep < 1:
            raise BadInput(f"keep must be at least 1, not {keep}")
        self.changes = Changes()
        """Notified whenever a version is announced, a leaf arrives, or a version is complete or given up."""
        self._root = root
        self._job_id = job_id
        self._public_key = public_key
        self._keep = keep
        self._leaf_bytes = leaf_bytes
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._lock = threading.Lock()
        # The relay's event loop takes the lock, so nothing that waits for the disk may be done while holding it.
        self._begin_lock = threading.Lock()
        self._complete: dict[int, Snapshot] = {}
        self._incoming: Incoming | None = None
        self._pins: Counter[int] = Counter()
        root.mkdir(parents=True, exist_ok=True)
        self._scan()

    def latest(self) -> Snapshot | None:
        """The newest complete version."""
        with self._lock:
            return self._complete[max(self._complete)] if self._complete else None

    def get(self, version: int) -> Snapshot | None:
        """A complete version, or None."""
        with self._lock:
            return self._complete.get(version)

    def newest_after(self, version: int) -> tuple[int, bytes] | None:
        """Version and signed document of the newest version > `version`, complete or arriving."""
        with self._lock:
            found = {v: snapshot.document for v, snapshot in self._complete.items()}
            if self._incoming is not None and not self._incoming.closed:
                found.setdefault(self._incoming.version, self._incoming.document)
        newest = max(found, default=-1)
        return (newest, found[newest]) if newest > version else None

    def open(self, version: int) -> Reader | None:
        """A reader of a version, complete or arriving, that keeps it from being removed; None if it is unknown."""
        with self._lock:
            snapshot, incoming = self._complete.get(version), self._incoming
            if snapshot is not None:
                reader = Reader(snapshot.payload_path, snapshot.manifest, None, on_close=lambda: self._unpin(version))
            elif incoming is not None and incoming.version == version and not incoming.closed:
                path = incoming.folder / PAYLOAD
                try:
                    reader = Reader(path, incoming.manifest, incoming, on_close=lambda: self._unpin(version))
                except FileNotFoundError:  # given up and removed this moment
                    return None
            else:
                return None
            self._pins[version] += 1
            return reader

    @contextlib.contextmanager
    def pin(self, version: int) -> Iterator[None]:
        """Within this context the version is not removed (while installing or uploading it)."""
        with self._lock:
            self._pins[version] += 1
        try:
            yield
        finally:
            self._unpin(version)

    def close(self) -> None:
        """End the download that is running, if any. What was received stays on disk for `begin`."""
        with self._begin_lock, self._lock:
            incoming = self._incoming
        if incoming is not None:
            incoming.close()

    def publish_full(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        version: int,
        key: Ed25519PrivateKey,
        assets: Sequence[AssetEntry] = (),
    ) -> Snapshot:
        """Learner: encode, hash, sign and announce a version. Blocks; call it in a thread.

        Publishing the same weights again (after a restart) returns what is there. Raises Conflict for other weights
        under a published version or for a version older than the newest, BadInput for a state that can't be encoded
        or a key that isn't this store's.
        """
        if public_hex(key) != self._public_key:
            raise BadInput("the signing key does not belong to this store's public key")
        if not 0 <= version <= MAX_VERSION:
            raise BadInput(f"version must be 0…{MAX_VERSION}, not {version}")
        folder = self._root / f"{version}.new"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            tensors = encode_full(state, folder / PAYLOAD)
            manifest = self._describe(folder / PAYLOAD, version, tensors, assets)
            document = sign(manifest, key)
            write_synced(folder / DOCUMENT, document)
            snapshot = self._already(manifest) or self._install(folder, manifest, document)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.changes.notify()
        return snapshot

    def begin(self, document: bytes) -> Incoming:
        """Start or go on with receiving a version. Blocks while leaves already on disk are hashed.

        A version that was arriving and is another one is closed: there is one download at a time. Raises
        IntegrityError for a document that isn't this job's, Conflict for a version that is not newer than the newest.
        """
        manifest = verify(document, public_key=self._public_key, job_id=self._job_id)
        with self._begin_lock:
            with self._lock:
                newest = max(self._complete, default=-1)
                current = self._incoming
            if manifest.version <= newest:
                raise Conflict(f"version {manifest.version} is not newer than {newest}, which is here")
            if current is not None and not current.closed:
                if current.document == document:
                    return current
                current.close()
            folder = self._part(manifest, document)
            incoming = Incoming(folder, manifest, document, on_change=self.changes.notify, on_complete=self._arrived)
            with self._lock:
                self._incoming = incoming
        self.changes.notify()
        return incoming

    def _part(self, manifest: Manifest, document: bytes) -> Path:
        """The folder to receive into. What is in it is kept, for its leaves are verified; all others are removed."""
        folder = self._root / f"{manifest.version}.part"
        for other in self._root.glob("*.part"):
            if other != folder:
                shutil.rmtree(other)
        folder.mkdir(exist_ok=True)
        (folder / DOCUMENT).write_bytes(document)
        return folder

    def _arrived(self, incoming: Incoming) -> Snapshot:
        write_synced(incoming.folder / DOCUMENT, incoming.document)
        return self._install(incoming.folder, incoming.manifest, incoming.document)

    def _install(self, folder: Path, manifest: Manifest, document: bytes) -> Snapshot:
        """Put a whole, synced folder into place, count it, and remove what is too old and not being read."""
        target = self._root / str(manifest.version)
        snapshot = Snapshot(manifest.version, manifest, document, target / PAYLOAD)
        sync_folder(folder)
        with self._lock:
            folder.rename(target)
            self._complete[manifest.version] = snapshot
            old = [v for v in sorted(self._complete, reverse=True)[self._keep :] if not self._pins[v]]
            for version in old:
                del self._complete[version]
        sync_folder(self._root)
        for version in old:
            shutil.rmtree(self._root / str(version))
        return snapshot

    def _already(self, manifest: Manifest) -> Snapshot | None:
        """The published snapshot with this content, if any. Raises Conflict if the number can't be published."""
        with self._lock:
            known = self._complete.get(manifest.version)
            newest = max(self._complete, default=-1)
        if known is not None and known.manifest.payload_blake3 == manifest.payload_blake3:
            return known
        if manifest.version <= newest:
            raise Conflict(
                f"version {manifest.version} can't be published: version {newest} is, and a version never changes; "
                "resume from the checkpoint of the newest published version"
            )
        return None

    def _describe(
        self, payload: Path, version: int, tensors: list[TensorEntry], assets: Sequence[AssetEntry]
    ) -> Manifest:
        whole, leaves = blake3(), []
        with payload.open("rb") as file:
            while data := file.read(self._leaf_bytes):
                whole.update(data)
                leaves.append(blake3(data).hexdigest())
        return Manifest(
            job_id=self._job_id,
            version=version,
            payload_bytes=payload.stat().st_size,
            payload_blake3=whole.hexdigest(),
            leaf_bytes=self._leaf_bytes,
            chunk_bytes=self._chunk_bytes,
            leaf_hashes=leaves,
            tensors=tensors,
            assets=list(assets),
            created_at=self._clock(),
        )

    def _unpin(self, version: int) -> None:
        with self._lock:
            self._pins[version] -= 1
            if self._pins[version] <= 0:
                del self._pins[version]

    def _scan(self) -> None:
        """On start: hash what claims to be complete, remove what is not, and what is half written."""
        for leftover in self._root.glob("*.new"):
            shutil.rmtree(leftover)
        folders = [f for f in self._root.iterdir() if f.is_dir() and f.name.isascii() and f.name.isdigit()]
        for folder in sorted(folders, key=lambda f: int(f.name), reverse=True):
            try:
                if len(self._complete) < self._keep:
                    snapshot = self._reopen(folder)
                    self._complete[snapshot.version] = snapshot
                    continue
            except (IntegrityError, OSError) as error:
                log.warning("removed %s: %s", folder, error)
            shutil.rmtree(folder)
        for part in self._root.glob("*.part"):
            if not self._resumable(part):
                shutil.rmtree(part)

    def _reopen(self, folder: Path) -> Snapshot:
        document = read_document(folder)
        manifest = verify(document, public_key=self._public_key, job_id=self._job_id)
        payload = folder / PAYLOAD
        if folder.name != str(manifest.version):
            raise IntegrityError(f"the folder holds version {manifest.version}")
        if payload.stat().st_size != manifest.payload_bytes:
            raise IntegrityError("the payload's size is not the manifest's")
        if blake3(max_threads=blake3.AUTO).update_mmap(payload).hexdigest() != manifest.payload_blake3:
            raise IntegrityError("the payload's hash is not the manifest's")
        return Snapshot(manifest.version, manifest, document, payload)

    def _resumable(self, part: Path) -> bool:
        try:
            manifest = verify(read_document(part), public_key=self._public_key, job_id=self._job_id)
        except (IntegrityError, OSError):
            return False
        return manifest.version > max(self._complete, default=-1)


def upload(snapshot: Snapshot, objects: ObjectSink, prefix: str) -> None:
    """Put a snapshot into the object store: `{prefix}/{version}/chunks/{n}`, and last `…/manifest.json`. Blocks.

    The manifest's presence says that all chunks are there. Idempotent. Raises what the store raises.
    """
    manifest, base = snapshot.manifest, f"{prefix.rstrip('/')}/{snapshot.version}"
    # Opened once: a newer version's arrival may remove the folder meanwhile.
    with snapshot.payload_path.open("rb") as file:
        for n in range(manifest.chunks):
            objects.put(f"{base}/chunks/{n}", file.read(manifest.chunk_bytes))
    objects.put(f"{base}/manifest.json", snapshot.document)
