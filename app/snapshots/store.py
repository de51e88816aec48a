"""A job's snapshots on local disk: publishing them, receiving them.

Invariant: what the shelf counts is whole; a version that is published or arrives, whole or as a delta, is made beside
the others and counts from the last rename on. Killed in between, a process finds the old versions as they were.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.protocol.errors import BadInput, Conflict, IntegrityError
from app.snapshots.codec import encode_full
from app.snapshots.deltas import DeltaFile, build, check_pair
from app.snapshots.files import DOCUMENT, PAYLOAD, WHOLE_DOCUMENT, sync_folder, write_synced
from app.snapshots.incoming import Incoming, Reader, Snapshot
from app.snapshots.manifest import MAX_VERSION, AssetEntry, Manifest, Probe, public_hex, sign, verify
from app.snapshots.publish import Made, Publication, describe, make_delta
from app.snapshots.shelf import Shelf, hash_file
from app.snapshots.upload import upload

if TYPE_CHECKING:
    import torch

__all__ = ["Incoming", "Reader", "Snapshot", "SnapshotStore", "upload"]

log = logging.getLogger(__name__)


class SnapshotStore(Shelf):
    """The shelf of a learner, which publishes, or of a node, which receives one version at a time."""

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
        """Learner: `publish` without a delta."""
        return self.publish(state, version=version, key=key, assets=assets, deltas=False).snapshot

    def publish(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        version: int,
        key: Ed25519PrivateKey,
        assets: Sequence[AssetEntry] = (),
        deltas: bool = True,
        quantise: Literal["int8"] | None = None,
        probe: Callable[[Path], Probe] | None = None,
    ) -> Publication:
        """Learner: encode, hash, sign and announce a version, with the delta from the version before it if that pays.

        `quantise`: what nodes get, and sample with, are these weights in eight bits; `state` itself stays as it is.
        `probe` is asked what the payload's weights say of some tokens; what it raises ends the publish.
        Blocks; call it in a thread. Publishing the same weights again (after a restart) returns what is there. Raises
        Conflict for other weights under a published version or for a version older than the newest, BadInput for a
        state that can't be encoded or a key that isn't this store's.
        """
        if public_hex(key) != self._public_key:
            raise BadInput("the signing key does not belong to this store's public key")
        if not 0 <= version <= MAX_VERSION:
            raise BadInput(f"version must be 0…{MAX_VERSION}, not {version}")
        folder, beside = self._root / f"{version}.new", self._root / f"{version}.delta.new"
        for leftover in (folder, beside):
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir()
        try:
            tensors = encode_full(state, folder / PAYLOAD, quantise=quantise)
            manifest = describe(
                folder / PAYLOAD, version, tensors, assets,
                job_id=self._job_id, sizes=self._sizes, at=self._clock(), quantisation=quantise,
            )  # fmt: skip
            known = self._already(manifest)
            if known is not None:
                return self.published(known)
            if probe is not None:
                manifest = manifest.model_copy(update={"probe": probe(folder / PAYLOAD)})
            document = sign(manifest, key)
            write_synced(folder / DOCUMENT, document)
            made = Made(None, b"", None, "deltas are off")
            if deltas:
                base = self.latest()  # only this thread publishes, so that nothing removes it meanwhile
                made = make_delta(beside, base, folder / PAYLOAD, manifest, document, key=key, sizes=self._sizes)
            snapshot, placed = self._install(folder, manifest, document, beside, made)
        finally:
            for leftover in (folder, beside):
                shutil.rmtree(leftover, ignore_errors=True)
        self.changes.notify()
        return Publication(snapshot, placed, made.share, made.note, made.encode_s)

    def published(self, snapshot: Snapshot) -> Publication:
        """A version that was published before, and its delta if that is still here."""
        made = self.delta(snapshot.version)
        share = None if made is None else made.manifest.payload_bytes / snapshot.manifest.payload_bytes
        return Publication(snapshot, made, share, "" if made is not None else "published before; its delta isn't here")

    def begin(self, document: bytes) -> Incoming:
        """Start or go on with receiving a version whole. Blocks while leaves already on disk are hashed.

        A download that is running and is another one is closed: there is one at a time. Raises IntegrityError for a
        document that isn't this job's, Conflict for a version that is not newer than the newest.
        """
        manifest = verify(document, public_key=self._public_key, job_id=self._job_id)
        if not manifest.whole:
            raise IntegrityError(f"a version was due, and not the delta of version {manifest.version}")
        return self._begin(manifest, document)

    def begin_delta(self, document: bytes, whole: bytes) -> Incoming:
        """Start or go on with receiving a version as a delta; `whole`: the version's own signed document.

        As `begin`. Raises Conflict, too, when the delta's base isn't here: then fetch the version whole.
        """
        manifest, _ = check_pair(document, whole, public_key=self._public_key, job_id=self._job_id)
        assert manifest.base is not None
        assert manifest.delta is not None
        base = self.get(manifest.base)
        if base is None or base.manifest.payload_blake3 != manifest.delta.base_blake3:
            raise Conflict(f"the delta of version {manifest.version} needs version {manifest.base}, which is not here")
        return self._begin(manifest, document, whole)

    def _begin(self, manifest: Manifest, document: bytes, whole: bytes = b"") -> Incoming:
        with self._begin_lock:
            with self._lock:
                latest = max(self._complete, default=-1)
                current = self._incoming
            if manifest.version <= latest:
                raise Conflict(f"version {manifest.version} is not newer than {latest}, which is here")
            if current is not None and not current.closed:
                if current.document == document:
                    return current
                current.close()
            folder = self._part(manifest, document, whole)
            incoming = Incoming(
                folder, manifest, document, on_change=self.changes.notify, on_complete=self._arrived, whole=whole
            )
            with self._lock:
                self._incoming = incoming
        self.changes.notify()
        return incoming

    def _part(self, manifest: Manifest, document: bytes, whole: bytes) -> Path:
        """The folder to receive into. What is in it is kept, for its leaves are verified; all others are removed."""
        name = str(manifest.version) if manifest.whole else f"{manifest.version}.delta"
        folder = self._root / f"{name}.part"
        with self._lock:
            unused = self._deltas.forget(manifest.version) if whole else None
        if unused is not None and not folder.exists():
            unused.rename(folder)  # it was here and could not be applied: its bytes are looked at again
        for other in self._root.glob("*.part"):
            if other != folder:
                shutil.rmtree(other)
        folder.mkdir(exist_ok=True)
        (folder / DOCUMENT).write_bytes(document)
        if whole:
            (folder / WHOLE_DOCUMENT).write_bytes(whole)
        return folder

    def _arrived(self, incoming: Incoming) -> Callable[[], Snapshot]:
        write_synced(incoming.folder / DOCUMENT, incoming.document)
        if not incoming.whole:
            snapshot, _ = self._install(incoming.folder, incoming.manifest, incoming.document)
            return lambda: snapshot
        write_synced(incoming.folder / WHOLE_DOCUMENT, incoming.whole)
        sync_folder(incoming.folder)
        with self._lock:
            made = self._deltas.place(incoming.folder, incoming.manifest, incoming.document, incoming.whole)
        sync_folder(self._root)
        return partial(self._apply, made)

    def _apply(self, made: DeltaFile) -> Snapshot:
        """Make the version out of its base, beside it; until the last rename nothing else has changed."""
        target = verify(made.whole, public_key=self._public_key, job_id=self._job_id)
        folder = self._root / f"{target.version}.new"
        shutil.rmtree(folder, ignore_errors=True)
        with self.pin(made.base):
            base = self.get(made.base)
            if base is None:
                raise IntegrityError(f"version {made.base}, which the delta of {target.version} needs, is gone")
            folder.mkdir()
            try:
                build(made, base.payload_path, folder / PAYLOAD)
                write_synced(folder / DOCUMENT, made.whole)
                snapshot, _ = self._install(folder, target, made.whole)
            except IntegrityError:
                self._distrust(made, base)
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        self.changes.notify()
        return snapshot

    def _distrust(self, made: DeltaFile, base: Snapshot) -> None:
        """A delta didn't give what it should: it goes, and so does its base if that is damaged."""
        with self._lock:
            gone = [self._deltas.forget(made.manifest.version)]
        if hash_file(base.payload_path) != base.manifest.payload_blake3:
            log.error("version %d is damaged on disk and removed", base.version)
            with self._lock:
                self._complete.pop(base.version, None)
            gone.append(base.payload_path.parent)
        for folder in gone:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

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
