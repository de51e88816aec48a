"""The learner's snapshot store, relay and upload behind the publisher's interface.

Invariant: a version is encoded once; a restarted learner serves and announces what it published before, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from app.learner.publisher import Announcement
from app.protocol.errors import LearnerError, NotFound
from app.protocol.learner import AssetInfo
from app.snapshots.manifest import AssetEntry, load_or_create_key, public_hex
from app.snapshots.relay import Relay
from app.snapshots.store import SnapshotStore, upload
from app.storage.objects import ObjectStore


class RelaySink:
    """Keeps the newest versions under `folder`, signs with the key in it, serves on `host` at a free port."""

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str,
        relay_token: str,
        host: str,
        uplink_bytes_per_s: float | None,
        objects: ObjectStore,
        assets: Sequence[AssetInfo],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._key = load_or_create_key(folder / "signing.key")
        self.public_key = public_hex(self._key)
        self._store = SnapshotStore(folder / "snapshots", job_id=job_id, public_key=self.public_key)
        self._relay = Relay(self._store, token=relay_token, host=host, port=0, uplink_bytes_per_s=uplink_bytes_per_s)
        self._host = host
        self._objects = objects
        self._prefix = f"jobs/{job_id}/snapshots"
        self._assets = [AssetEntry(path=a.path, size=a.size, blake3=a.blake3) for a in assets]

    def start(self) -> None:
        """Open the relay. Raises LearnerError if the address can't be bound."""
        try:
            self._relay.run_in_thread()
        except OSError as error:
            raise LearnerError(
                f"the relay can't listen on {self._host}: {error.strerror}; set ECHO2_LEARNER_RELAY_HOST"
            ) from error

    def stop(self) -> None:
        """Close the relay."""
        self._relay.stop_thread()

    @property
    def newest(self) -> int | None:
        """The newest version on disk."""
        snapshot = self._store.latest()
        return None if snapshot is None else snapshot.version

    @property
    def bytes_served(self) -> int:
        """Payload bytes that left the relay."""
        return self._relay.bytes_served

    def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> Announcement:
        """Encode and serve a version, or serve the one of this number that is here."""
        snapshot = self._store.get(version) or self._store.publish_full(
            weights, version=version, key=self._key, assets=self._assets
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        return Announcement(
            version=version,
            bytes=snapshot.manifest.payload_bytes,
            chunks=snapshot.manifest.chunks,
            relay_url=f"http://{host}:{self._relay.port}",
        )

    def upload(self, version: int) -> None:
        """Put a version into the object store. Raises Unavailable, NotFound if the version is not here."""
        with self._store.pin(version):
            snapshot = self._store.get(version)
            if snapshot is None:
                raise NotFound(f"v{version} is not in the learner's snapshot store")
            upload(snapshot, self._objects, self._prefix)
