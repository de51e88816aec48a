"""The folder of a job's versions: `{version}/` complete, `{version}.delta/` what leads to it, `*.part/` arriving,
`*.new/` being written.

Invariant: a folder proves nothing. What is counted here was hashed by this process, as it arrived, was made or when the
folder was opened; folders are renamed into place only when they are whole and on disk. A version that is being read is
never removed. Thread-safe; all methods block on disk, none on the network.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blake3 import blake3

from app.protocol.base import utcnow
from app.protocol.errors import BadInput, IntegrityError
from app.snapshots.changes import Changes
from app.snapshots.deltas import DeltaFile, Deltas
from app.snapshots.files import PAYLOAD, read_document, sync_folder
from app.snapshots.incoming import Incoming, Reader, Snapshot
from app.snapshots.manifest import CHUNK_BYTES, LEAF_BYTES, Manifest, verify
from app.snapshots.plan import Offer, newest
from app.snapshots.publish import Made, Sizes

log = logging.getLogger(__name__)

KEEP_DELTAS = 32


@dataclass(frozen=True, slots=True)
class Announced:
    """What a relay announces: a version's signed document and, if the way to it is a delta, that of the delta."""

    version: int
    document: bytes
    delta: bytes = b""


class Shelf:
    """The newest `keep` complete versions of one job, the deltas that lead to the newest, and what is arriving.

    An older version that is being read or is pinned stays until the first new version after that. Of the chain of
    deltas that ends at the newest version those are kept that are together smaller than it, at most `keep_deltas`.

    Opening hashes every complete version found (seconds for large models: do it in a thread), removes those that are
    not what their manifest says, and keeps a half-received one for `SnapshotStore.begin` to verify.
    """

    def __init__(
        self,
        root: Path,
        *,
        job_id: str,
        public_key: str,
        keep: int = 2,
        keep_deltas: int = KEEP_DELTAS,
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
        self._sizes = Sizes(leaf_bytes, chunk_bytes)
        self._deltas = Deltas(root, public_key=public_key, job_id=job_id, keep=keep_deltas)
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

    @property
    def versions(self) -> list[int]:
        """The complete versions, newest first."""
        with self._lock:
            return sorted(self._complete, reverse=True)

    def delta(self, version: int) -> DeltaFile | None:
        """The complete delta that leads to a version, or None."""
        with self._lock:
            return self._deltas.get(version)

    def announce(self, after: int, held: Collection[int] = ()) -> Announced | None:
        """The next step to the newest version > `after` that can be reached with what is here, complete or arriving.

        `held`: versions that the one who asks has complete; without any, no delta is announced.
        """
        with self._lock:
            arriving = self._incoming if self._incoming is not None and not self._incoming.closed else None
            wholes = {v: s.manifest.payload_bytes for v, s in self._complete.items()}
            offers = self._deltas.offers()
            if arriving is not None and arriving.manifest.whole:
                wholes.setdefault(arriving.version, arriving.manifest.payload_bytes)
            elif arriving is not None:
                offers.append(Offer(arriving.version, arriving.manifest.base, arriving.manifest.payload_bytes))
            plan = newest(after, held=held, wholes=wholes, deltas=offers)
            if plan is None:
                return None
            step = plan.steps[0]
            complete, made = self._complete.get(step.version), self._deltas.get(step.version)
            if step.base is None:
                document = complete.document if complete is not None else arriving.document if arriving else b""
                return Announced(step.version, document)
            if made is not None:
                return Announced(step.version, made.whole, made.document)
            assert arriving is not None
            return Announced(step.version, arriving.whole, arriving.document)

    def newest_after(self, version: int) -> tuple[int, bytes] | None:
        """Version and signed document of the newest version > `version` that can be had whole, complete or arriving."""
        found = self.announce(version)
        return None if found is None else (found.version, found.document)

    def open(self, version: int) -> Reader | None:
        """A reader of a version, complete or arriving, that keeps it from being removed; None if it is unknown."""
        with self._lock:
            snapshot, incoming = self._complete.get(version), self._incoming
            if snapshot is not None:
                reader = Reader(snapshot.payload_path, snapshot.manifest, None, on_close=lambda: self._unpin(version))
            elif incoming is not None and incoming.manifest.whole and incoming.version == version:
                found = _arriving(incoming, on_close=lambda: self._unpin(version))
                if found is None:
                    return None
                reader = found
            else:
                return None
            self._pins[version] += 1
            return reader

    def open_delta(self, version: int) -> Reader | None:
        """A reader of the delta that leads to a version, complete or arriving; None if there is none here."""
        with self._lock:
            made, incoming = self._deltas.get(version), self._incoming
            if made is not None:
                # Its file may be removed while it is read: what is open stays readable.
                return Reader(made.path, made.manifest, None, on_close=lambda: None)
            if incoming is not None and incoming.manifest.kind == "delta" and incoming.version == version:
                return _arriving(incoming, on_close=lambda: None)
            return None

    @contextlib.contextmanager
    def pin(self, version: int) -> Iterator[None]:
        """Within this context the version is not removed (while installing or uploading it)."""
        with self._lock:
            self._pins[version] += 1
        try:
            yield
        finally:
            self._unpin(version)

    def _install(
        self, folder: Path, manifest: Manifest, document: bytes, beside: Path | None = None, made: Made | None = None
    ) -> tuple[Snapshot, DeltaFile | None]:
        """Put a whole, synced folder into place, count it, and remove what is too old and not being read.

        `beside`, `made`: the folder with the version's delta, if it has one; both become visible at once.
        """
        target = self._root / str(manifest.version)
        snapshot = Snapshot(manifest.version, manifest, document, target / PAYLOAD)
        sync_folder(folder)
        placed = None
        with self._lock:
            if beside is not None and made is not None and made.manifest is not None:
                placed = self._deltas.place(beside, made.manifest, made.document, document)
            folder.rename(target)
            self._complete[manifest.version] = snapshot
            old = [v for v in sorted(self._complete, reverse=True)[self._keep :] if not self._pins[v]]
            for version in old:
                del self._complete[version]
            gone = self._deltas.outdated(manifest.version, manifest.payload_bytes)
        sync_folder(self._root)
        for path in (*gone, *(self._root / str(version) for version in old)):
            shutil.rmtree(path, ignore_errors=True)
        return snapshot, placed

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
        latest = self.latest()
        self._deltas.scan(-1 if latest is None else latest.version)
        if latest is not None:
            for gone in self._deltas.outdated(latest.version, latest.manifest.payload_bytes):
                shutil.rmtree(gone)
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
        if not manifest.whole or hash_file(payload) != manifest.payload_blake3:
            raise IntegrityError("the payload's hash is not the manifest's")
        return Snapshot(manifest.version, manifest, document, payload)

    def _resumable(self, part: Path) -> bool:
        try:
            manifest = verify(read_document(part), public_key=self._public_key, job_id=self._job_id)
        except (IntegrityError, OSError):
            return False
        return manifest.version > max(self._complete, default=-1)


def hash_file(path: Path) -> str:
    """blake3 of a file, hex, on all processors."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _arriving(incoming: Incoming, *, on_close: Callable[[], None]) -> Reader | None:
    """A reader of a download; None if it is over."""
    if incoming.closed:
        return None
    try:
        return Reader(incoming.path, incoming.manifest, incoming, on_close=on_close)
    except FileNotFoundError:  # given up and removed this moment
        return None
