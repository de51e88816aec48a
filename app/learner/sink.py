"""The learner's snapshot store, relay and upload behind the publisher's interface.

Invariant: a version is encoded once; a restarted learner serves and announces what it published before, bit for bit.
Whatever the object store has as a delta can be reached from a whole version that is there, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from app.learner.publisher import Announcement, Uploaded
from app.protocol.errors import LearnerError, NotFound
from app.protocol.job import SnapshotSpec
from app.protocol.learner import AssetInfo, PublishedDelta
from app.snapshots.codec import decode
from app.snapshots.deltas import DeltaFile
from app.snapshots.manifest import AssetEntry, Probe, load_or_create_key, public_hex
from app.snapshots.plan import keyframe
from app.snapshots.publish import Publication
from app.snapshots.rates import News, Rate
from app.snapshots.relay import Relay
from app.snapshots.store import SnapshotStore
from app.snapshots.upload import ObjectSink, upload, upload_delta

log = logging.getLogger(__name__)
_PORT = re.compile(r":[0-9]+$")


class Counted:
    """An object store that counts what is put there."""

    def __init__(self, objects: ObjectSink) -> None:
        self._objects = objects
        self.puts = 0

    def put(self, key: str, data: bytes) -> None:
        """Store bytes, replacing what was there."""
        self._objects.put(key, data)
        self.puts += 1


class RelaySink:
    """Keeps the newest versions under `folder`, signs with the key in it, serves on `host`.

    `keep`: how many. `port` 0: a free one. `announce` is where others reach it, `host` or `host:port`, if that is not
    where it listens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str,
        relay_token: str,
        host: str,
        uplink_bytes_per_s: float | None,
        objects: ObjectSink,
        assets: Sequence[AssetInfo],
        snapshots: SnapshotSpec | None = None,
        port: int = 0,
        announce: str = "",
        keep: int = 2,
        probe: Callable[[Path], Probe] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._key = load_or_create_key(folder / "signing.key")
        self.public_key = public_hex(self._key)
        self._store = SnapshotStore(folder / "snapshots", job_id=job_id, public_key=self.public_key, keep=keep)
        self._relay = Relay(self._store, token=relay_token, host=host, port=port, uplink_bytes_per_s=uplink_bytes_per_s)
        self._news = News()
        self._host = host
        self._announce = announce
        self._objects = Counted(objects)
        self._prefix = f"jobs/{job_id}/snapshots"
        self._spec = snapshots or SnapshotSpec()
        self._stored: int | None = None
        """The version that this process put into the object store last."""
        self._since = 0
        """Deltas put there after the last whole version."""
        self._probe = probe
        self._published: set[int] = set()
        """By this process."""
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

    @property
    def uploaded(self) -> int:
        """Objects that went into the store."""
        return self._objects.puts

    def uplink(self) -> Rate | None:
        """What the relay's link carries, if that was measured since the last call."""
        return self._news.of("relay", self._relay.meter)

    def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> Announcement:
        """Encode and serve a version, or serve the one of this number that is here."""
        snapshot = self._store.get(version)
        if snapshot is not None:
            made = self._store.published(snapshot)
        else:
            made = self._store.publish(
                weights, version=version, key=self._key, assets=self._assets,
                deltas=self._spec.deltas, quantise=self._spec.quantise, probe=self._probe,
            )  # fmt: skip
        log.info("%s", described(made))
        self._published.add(version)
        manifest = made.snapshot.manifest
        return Announcement(
            version=version,
            bytes=manifest.payload_bytes,
            chunks=manifest.chunks,
            relay_url=relay_url(self._host, self._relay.port, self._announce),
            delta=None if made.delta is None else _delta(made.delta),
            delta_share=made.share,
            note=made.note,
        )

    def weights(self, version: int) -> Mapping[str, torch.Tensor] | None:
        """A published version as nodes decode it, on the CPU; None if it is not here any more."""
        with self._store.pin(version):
            snapshot = self._store.get(version)
            return None if snapshot is None else decode(snapshot.payload_path)

    def never_published(self, version: int) -> bool:
        """Whether it is certain that no node can have had this version: this process would know."""
        mine = self._published
        return bool(mine) and min(mine) < version < max(mine) and version not in mine

    def upload(self, version: int) -> Uploaded:
        """Put a version into the object store, whole or its delta. Raises Unavailable, NotFound if it is not here."""
        with self._store.pin(version):
            snapshot, made = self._store.get(version), self._store.delta(version)
            if snapshot is None:
                raise NotFound(f"v{version} is not in the learner's snapshot store")
            base = None if made is None else made.base
            if made is None or keyframe(base, stored=self._stored, since=self._since, every=self._spec.keyframe_every):
                upload(snapshot, self._objects, self._prefix)
                self._stored, self._since = version, 0
                return "full"
            upload_delta(made, self._objects, self._prefix)
            self._stored, self._since = version, self._since + 1
            return "delta"


def _delta(made: DeltaFile) -> PublishedDelta:
    return PublishedDelta(base=made.base, bytes=made.manifest.payload_bytes, chunks=made.manifest.chunks)


def described(made: Publication) -> str:
    """A publish in words, for the log."""
    full, version = made.snapshot.manifest.payload_bytes, made.snapshot.version
    if made.delta is None:
        return f"v{version}: {full} bytes; no delta: {made.note}"
    size = made.delta.manifest.payload_bytes
    took = f", made in {made.encode_s:.2f} s" if made.encode_s else ""
    return f"v{version}: {full} bytes; from v{made.delta.base} a delta of {size} ({size / full:.2%}{took})"


def relay_url(host: str, port: int, announce: str = "") -> str:
    """Where a relay that listens at `host` and `port` is found: at `announce`, on `port` unless it names another."""
    name = announce or (f"[{host}]" if ":" in host else host)
    return f"http://{name}" if _PORT.search(name) else f"http://{name}:{port}"
