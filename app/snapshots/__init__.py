"""Snapshots: immutable, signed policy versions, and their way from the learner down the chains.

Invariant: nothing is installed or passed on whose hash isn't in a manifest that the job's key signed.
"""

from app.snapshots.codec import decode, encode_full
from app.snapshots.manifest import (
    AssetEntry,
    Manifest,
    TensorEntry,
    load_or_create_key,
    new_key,
    public_hex,
    sign,
    verify,
)
from app.snapshots.pacer import Pacer
from app.snapshots.puller import Puller
from app.snapshots.relay import Relay
from app.snapshots.sources import Source
from app.snapshots.store import Incoming, Reader, Snapshot, SnapshotStore, upload

__all__ = [
    "AssetEntry",
    "Incoming",
    "Manifest",
    "Pacer",
    "Puller",
    "Reader",
    "Relay",
    "Snapshot",
    "SnapshotStore",
    "Source",
    "TensorEntry",
    "decode",
    "encode_full",
    "load_or_create_key",
    "new_key",
    "public_hex",
    "sign",
    "upload",
    "verify",
]
