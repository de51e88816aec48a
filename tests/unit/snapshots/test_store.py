"""What is on disk is served only after it was hashed, and only while nobody needs its room."""

import json
from pathlib import Path

import pytest
import torch

from app.protocol.errors import BadInput, Conflict, IntegrityError
from app.snapshots import Incoming, Snapshot, SnapshotStore, new_key, public_hex
from app.snapshots.manifest import sign

torch.set_num_threads(1)
KEY = new_key()
LEAF = 64


def store(root: Path, keep: int = 2) -> SnapshotStore:
    return SnapshotStore(root, job_id="j", public_key=public_hex(KEY), keep=keep, leaf_bytes=LEAF, chunk_bytes=LEAF * 4)


def publish(into: SnapshotStore, version: int) -> Snapshot:
    generator = torch.Generator().manual_seed(version)
    return into.publish_full({"w": torch.randn(40, 8, generator=generator)}, version=version, key=KEY)


def leaf(snapshot: Snapshot, n: int) -> bytes:
    return snapshot.payload_path.read_bytes()[n * LEAF : (n + 1) * LEAF]


def receive(incoming: Incoming, snapshot: Snapshot, upto: int) -> None:
    for n in range(incoming.have, upto):
        incoming.write_leaf(n, leaf(snapshot, n))


def test_the_newest_versions_are_kept(tmp_path: Path) -> None:
    s = store(tmp_path)
    for version in range(4):
        publish(s, version)
    assert [v for v in range(4) if s.get(v)] == [2, 3]
    latest = s.latest()
    assert latest is not None
    assert latest.version == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_a_version_that_is_being_read_is_not_removed(tmp_path: Path) -> None:
    s = store(tmp_path, keep=1)
    first = publish(s, 0)
    reader = s.open(0)
    assert reader is not None
    publish(s, 1)
    assert first.payload_path.exists()
    assert reader.read(0) == leaf(first, 0)
    reader.close()
    with s.pin(1):
        publish(s, 2)
        assert s.get(1) is not None
    publish(s, 3)
    assert [v for v in range(4) if s.get(v)] == [3]
    assert not first.payload_path.exists()


def test_a_restart_serves_what_was_complete(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path), 5)
    again = store(tmp_path)
    assert again.get(5) == snapshot
    assert again.newest_after(4) == (5, snapshot.document)
    assert again.newest_after(5) is None


@pytest.mark.parametrize("damage", ["bit", "short", "long", "no manifest", "other version", "foreign key"])
def test_a_complete_looking_folder_that_is_not_right_is_not_served(damage: str, tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path), 5)
    payload, folder = snapshot.payload_path, snapshot.payload_path.parent
    data = bytearray(payload.read_bytes())
    if damage == "bit":
        data[200] ^= 1
        payload.write_bytes(data)
    elif damage == "short":
        payload.write_bytes(data[:-1])
    elif damage == "long":
        payload.write_bytes(data + b"\0")
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "other version":
        folder.rename(tmp_path / "6")
    else:
        document = json.loads(snapshot.document)
        document["signature"] = "0" * 128
        (folder / "manifest.json").write_text(json.dumps(document))
    again = store(tmp_path)
    assert again.latest() is None
    assert again.newest_after(-1) is None
    assert again.open(5) is None
    assert list(tmp_path.iterdir()) == []


def test_a_half_received_version_is_verified_again_after_a_restart(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path / "a"), 1)
    incoming = store(tmp_path / "b").begin(snapshot.document)
    receive(incoming, snapshot, 7)
    part = next((tmp_path / "b").glob("*.part")) / "payload.safetensors"
    data = bytearray(part.read_bytes())
    data[4 * LEAF + 3] ^= 0x10
    part.write_bytes(data)

    restarted = store(tmp_path / "b")
    assert restarted.newest_after(-1) is None, "a leftover is not announced before it is taken up"
    resumed = restarted.begin(snapshot.document)
    assert resumed.have == 4, "goes on at the first leaf that has not the manifest's hash"
    receive(resumed, snapshot, snapshot.manifest.leaves)
    assert resumed.complete().payload_path.read_bytes() == snapshot.payload_path.read_bytes()


def test_a_half_received_version_of_another_manifest_is_thrown_away(tmp_path: Path) -> None:
    first, second = publish(store(tmp_path / "a"), 1), publish(store(tmp_path / "c"), 2)
    receive(store(tmp_path / "b").begin(first.document), first, 7)
    assert store(tmp_path / "b").begin(second.document).have == 0
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["2.part"]


def test_a_half_received_version_with_a_forged_manifest_is_thrown_away(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path / "a"), 1)
    receive(store(tmp_path / "b").begin(snapshot.document), snapshot, 3)
    (tmp_path / "b" / "1.part" / "manifest.json").write_bytes(b"{}")
    store(tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


def test_only_the_manifests_bytes_are_accepted(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path / "a"), 1)
    receiver = store(tmp_path / "b")
    incoming = receiver.begin(snapshot.document)
    flipped = bytearray(leaf(snapshot, 0))
    flipped[10] ^= 1
    with pytest.raises(IntegrityError, match="hash"):
        incoming.write_leaf(0, flipped)
    with pytest.raises(IntegrityError, match="bytes"):
        incoming.write_leaf(0, leaf(snapshot, 0)[:-1])
    with pytest.raises(Conflict, match="leaf 0 is next"):
        incoming.write_leaf(1, leaf(snapshot, 1))
    with pytest.raises(Conflict, match="0 of"):
        incoming.complete()
    assert incoming.have == 0
    reader = receiver.open(1)
    assert reader is not None
    with pytest.raises(Conflict):
        reader.read(0)


def test_a_newer_version_ends_the_download_of_an_older_one(tmp_path: Path) -> None:
    first, second = publish(store(tmp_path / "a"), 1), publish(store(tmp_path / "c"), 2)
    s = store(tmp_path / "b")
    old = s.begin(first.document)
    receive(old, first, 2)
    reader = s.open(1)
    assert reader is not None
    new = s.begin(second.document)
    assert reader.over
    assert s.newest_after(-1) == (2, second.document)
    with pytest.raises(Conflict, match="closed"):
        old.write_leaf(2, leaf(first, 2))
    receive(new, second, second.manifest.leaves)
    new.complete()
    with pytest.raises(Conflict, match="not newer"):
        s.begin(first.document)


def test_a_reader_goes_on_when_the_version_becomes_complete(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path / "a"), 1)
    s = store(tmp_path / "b")
    incoming = s.begin(snapshot.document)
    receive(incoming, snapshot, 2)
    reader = s.open(1)
    assert reader is not None
    assert (reader.ready, reader.over) == (2, False)
    receive(incoming, snapshot, snapshot.manifest.leaves)
    incoming.complete()
    last = snapshot.manifest.leaves - 1
    assert (reader.ready, reader.over) == (last + 1, True)
    assert reader.read(last) == leaf(snapshot, last)


def test_a_published_version_never_changes(tmp_path: Path) -> None:
    s = store(tmp_path)
    first = publish(s, 1)
    assert publish(s, 1) is first
    with pytest.raises(Conflict, match="never changes"):
        s.publish_full({"w": torch.zeros(3)}, version=1, key=KEY)
    with pytest.raises(Conflict, match="version 1 is"):
        s.publish_full({"w": torch.zeros(3)}, version=0, key=KEY)
    with pytest.raises(BadInput, match="key"):
        s.publish_full({"w": torch.zeros(3)}, version=2, key=new_key())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]


def test_what_is_left_of_another_payload_of_this_version_counts_for_nothing(tmp_path: Path) -> None:
    first, other = (
        publish(store(tmp_path / "a"), 1),
        store(tmp_path / "c").publish_full({"w": torch.zeros(40, 8)}, version=1, key=KEY),
    )
    receive(store(tmp_path / "b").begin(first.document), first, first.manifest.leaves)
    incoming = store(tmp_path / "b").begin(other.document)
    assert incoming.have < other.manifest.leaves
    receive(incoming, other, other.manifest.leaves)
    assert incoming.complete().payload_path.read_bytes() == other.payload_path.read_bytes()


async def test_a_change_is_not_missed_and_silence_ends(tmp_path: Path) -> None:
    s = store(tmp_path)
    seen = s.changes.count
    assert await s.changes.wait(seen, 0.01) is False
    publish(s, 0)
    assert await s.changes.wait(seen, 5) is True


def test_leaves_that_are_right_one_by_one_make_no_version_of_another_hash(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path / "learner"), 5)
    wrong = snapshot.manifest.model_copy(update={"payload_blake3": "0" * 64})
    s = store(tmp_path / "node")
    incoming = s.begin(sign(wrong, KEY))
    receive(incoming, snapshot, wrong.leaves)
    with pytest.raises(IntegrityError, match="does not have the manifest's hash"):
        incoming.complete()
    assert s.latest() is None
    assert not incoming.folder.exists(), "else it would be gone on with for ever"


def test_what_lies_behind_the_last_leaf_of_a_resumed_download_is_cut_off(tmp_path: Path) -> None:
    snapshot = publish(store(tmp_path / "learner"), 5)
    first = store(tmp_path / "node").begin(snapshot.document)
    receive(first, snapshot, snapshot.manifest.leaves)
    first.close()
    with first.path.open("ab") as file:
        file.write(b"of an earlier, longer one")
    s = store(tmp_path / "node")
    made = s.begin(snapshot.document).complete()
    assert made.payload_path.read_bytes() == snapshot.payload_path.read_bytes()


def test_a_version_that_has_become_shorter_on_disk_is_not_passed_on(tmp_path: Path) -> None:
    s = store(tmp_path)
    snapshot = publish(s, 5)
    reader = s.open(5)
    assert reader is not None
    with reader, snapshot.payload_path.open("r+b") as file:
        file.truncate(LEAF + 1)
        assert reader.read(0) == leaf(snapshot, 0)
        with pytest.raises(IntegrityError, match="shorter"):
            reader.read(1)
