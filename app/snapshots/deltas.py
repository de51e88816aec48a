"""Deltas on local disk: `{version}.delta/` holds the signed document of the delta, that of the version, and the bytes.

Invariant: a delta that `get` returns was hashed against its signed manifest by this process, and it leads to exactly
the version whose document it is kept with. Not thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from app.protocol.errors import IntegrityError
from app.snapshots.delta import rebuild
from app.snapshots.files import WHOLE_DOCUMENT, delta_folder, payload_name, read_document, sync
from app.snapshots.manifest import Manifest, verify
from app.snapshots.plan import Offer, useful

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A complete delta on disk. `document` is the delta's, `whole` that of the version that it leads to."""

    manifest: Manifest
    document: bytes
    whole: bytes
    path: Path

    @property
    def base(self) -> int:
        """The version that it is applied to."""
        assert self.manifest.base is not None
        return self.manifest.base

    @property
    def offer(self) -> Offer:
        """The delta as a step of a plan."""
        return Offer(self.manifest.version, self.base, self.manifest.payload_bytes)


def check_pair(document: bytes, whole: bytes, *, public_key: str, job_id: str) -> tuple[Manifest, Manifest]:
    """The manifests of a delta and of the version that it leads to. IntegrityError unless they fit together."""
    manifest = verify(document, public_key=public_key, job_id=job_id)
    target = verify(whole, public_key=public_key, job_id=job_id)
    if manifest.kind != "delta" or manifest.delta is None or not target.whole:
        raise IntegrityError("a delta and the version that it leads to were due")
    given = (manifest.version, manifest.delta.result_bytes, manifest.delta.result_blake3)
    if given != (target.version, target.payload_bytes, target.payload_blake3):
        raise IntegrityError(f"the delta of version {manifest.version} leads to something else than its manifest says")
    return manifest, target


def build(made: DeltaFile, base: Path, target: Path) -> None:
    """Write the payload that a delta makes of a base's, and put it on disk. Blocks; holds a few blocks in memory.

    Raises IntegrityError when the delta or the base is damaged; OSError when the disk is full.
    """
    of = made.manifest.delta
    assert of is not None
    with base.open("rb") as before, made.path.open("rb") as packed, target.open("wb") as out:
        found = rebuild(before, packed, out, size=base.stat().st_size)
        sync(out)
    if found != of.result_blake3:
        raise IntegrityError(
            f"the delta of version {made.manifest.version} gives another payload than its manifest says"
        )


class Deltas:
    """The complete deltas of one store's folder."""

    def __init__(self, root: Path, *, public_key: str, job_id: str, keep: int) -> None:
        self._root = root
        self._public_key = public_key
        self._job_id = job_id
        self._keep = keep
        self._files: dict[int, DeltaFile] = {}

    def __iter__(self) -> Iterator[DeltaFile]:
        return iter(self._files.values())

    def get(self, version: int) -> DeltaFile | None:
        """The delta that leads to a version, or None."""
        return self._files.get(version)

    def offers(self) -> list[Offer]:
        """All of them as steps of a plan."""
        return [made.offer for made in self._files.values()]

    def place(self, folder: Path, manifest: Manifest, document: bytes, whole: bytes) -> DeltaFile:
        """Rename a whole, synced folder into place and count it."""
        target = delta_folder(self._root, manifest.version)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
        made = DeltaFile(manifest, document, whole, target / payload_name("delta"))
        self._files[manifest.version] = made
        return made

    def forget(self, version: int) -> Path | None:
        """Count a delta no more; its folder, which the caller removes."""
        made = self._files.pop(version, None)
        return None if made is None else made.path.parent

    def outdated(self, newest: int, whole_bytes: int) -> list[Path]:
        """Forget those that no node would take any more; their folders, which the caller removes."""
        kept = useful(newest, whole_bytes, self.offers(), self._keep)
        # One that leads beyond the newest version is about to be applied.
        gone = [version for version in self._files if version not in kept and version <= newest]
        return [path for path in map(self.forget, gone) if path is not None]

    def scan(self, newest: int) -> None:
        """On start: hash what is there. One that was not applied yet becomes a download to go on with."""
        for folder in self._root.glob("*.delta"):
            try:
                made = self._reopen(folder)
            except (IntegrityError, OSError) as error:
                log.warning("removed %s: %s", folder, error)
                shutil.rmtree(folder)
                continue
            if made.manifest.version > newest:
                folder.rename(folder.with_name(folder.name + ".part"))
            else:
                self._files[made.manifest.version] = made

    def _reopen(self, folder: Path) -> DeltaFile:
        document, whole = read_document(folder), read_document(folder, WHOLE_DOCUMENT)
        manifest, _ = check_pair(document, whole, public_key=self._public_key, job_id=self._job_id)
        path = folder / payload_name("delta")
        if folder != delta_folder(self._root, manifest.version):
            raise IntegrityError(f"the folder holds the delta of version {manifest.version}")
        hasher = blake3(max_threads=blake3.AUTO).update_mmap(path)
        if path.stat().st_size != manifest.payload_bytes or hasher.hexdigest() != manifest.payload_blake3:
            raise IntegrityError("the delta isn't what its manifest says")
        return DeltaFile(manifest, document, whole, path)
