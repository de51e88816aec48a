"""Deltas on disk: applied beside the old version, kept as long as they pay, and never trusted unhashed."""

from pathlib import Path

import pytest
import torch

from app.protocol.errors import Conflict, IntegrityError
from app.snapshots import Incoming, Manifest, SnapshotStore, new_key, public_hex, sign, store
from app.snapshots.deltas import DeltaFile
from app.snapshots.manifest import leaf_bytes_for
from app.snapshots.publish import Publication

torch.set_num_threads(1)
KEY = new_key()
LEAF = 64


def make(root: Path, **options: int) -> SnapshotStore:
    return SnapshotStore(root, job_id="j", public_key=public_hex(KEY), leaf_bytes=LEAF, chunk_bytes=LEAF * 4, **options)


def publish(into: SnapshotStore, version: int, elements: int = 4000) -> Publication:
    state = torch.ones(elements)
    state[: version * 7] += 1
    return into.publish({"w": state}, version=version, key=KEY)


def made(publication: Publication) -> DeltaFile:
    assert publication.delta is not None, publication.note
    return publication.delta


def feed(incoming: Incoming, path: Path) -> Incoming:
    data = path.read_bytes()
    for n in range(incoming.have, incoming.manifest.leaves):
        incoming.write_leaf(n, data[n * LEAF : (n + 1) * LEAF])
    return incoming


def node_at(root: Path, publication: Publication) -> SnapshotStore:
    """A store that has received a version whole."""
    s = make(root)
    feed(s.begin(publication.snapshot.document), publication.snapshot.payload_path).complete()
    return s


@pytest.fixture
def learner(tmp_path: Path) -> SnapshotStore:
    return make(tmp_path / "learner")


def test_an_applied_delta_is_the_version_and_the_old_one_stays(tmp_path: Path, learner: SnapshotStore) -> None:
    s = node_at(tmp_path / "n", publish(learner, 0))
    second = publish(learner, 1)
    got = feed(s.begin_delta(made(second).document, made(second).whole), made(second).path).complete()
    assert got.payload_path.read_bytes() == second.snapshot.payload_path.read_bytes()
    assert got.document == second.snapshot.document
    assert s.versions == [1, 0]
    again = make(tmp_path / "n")
    assert again.get(1) == got
    assert again.delta(1) is not None, "it serves the delta, too, after a restart"


@pytest.mark.parametrize("dies", ["before", "within"])
def test_killed_while_applying_leaves_the_old_version_whole(
    dies: str, tmp_path: Path, learner: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = node_at(tmp_path / "n", publish(learner, 0))
    second = publish(learner, 1)

    def killed(_made: DeltaFile, base: Path, target: Path) -> None:
        if dies == "within":
            target.write_bytes(base.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "build", killed)
    monkeypatch.setattr(store.shutil, "rmtree", lambda *_, **__: None)  # the dead don't clean up
    incoming = feed(s.begin_delta(made(second).document, made(second).whole), made(second).path)
    with pytest.raises(KeyboardInterrupt):
        incoming.complete()
    monkeypatch.undo()
    again = make(tmp_path / "n")
    assert again.versions == [0]
    assert sorted(p.name for p in (tmp_path / "n").iterdir()) == ["0", "1.delta.part"]
    resumed = again.begin_delta(made(second).document, made(second).whole)
    assert resumed.have == made(second).manifest.leaves, "its bytes need not come again"
    assert resumed.complete().payload_path.read_bytes() == second.snapshot.payload_path.read_bytes()


def test_a_delta_whose_base_is_another_is_refused(tmp_path: Path, learner: SnapshotStore) -> None:
    s = node_at(tmp_path / "n", publish(learner, 0))
    publish(learner, 1)
    third = publish(learner, 2)
    with pytest.raises(Conflict, match="needs version 1, which is not here"):
        s.begin_delta(made(third).document, made(third).whole)
    other = make(tmp_path / "other")
    other.publish({"w": torch.zeros(4000)}, version=1, key=KEY)
    with pytest.raises(Conflict, match="needs version 1"):
        other.begin_delta(made(third).document, made(third).whole)
    assert s.versions == [0]


def test_a_delta_and_another_versions_document_do_not_go_together(tmp_path: Path, learner: SnapshotStore) -> None:
    first = publish(learner, 0)
    s = node_at(tmp_path / "n", first)
    second = publish(learner, 1)
    for document, whole in [
        (made(second).document, first.snapshot.document),
        (second.snapshot.document, second.snapshot.document),
        (made(second).document, made(second).document),
    ]:
        with pytest.raises(IntegrityError):
            s.begin_delta(document, whole)
    with pytest.raises(IntegrityError, match="not the delta"):
        s.begin(made(second).document)


def test_a_delta_that_gives_something_else_is_thrown_away(tmp_path: Path, learner: SnapshotStore) -> None:
    """Signed, but wrong: the version has to come whole."""
    s = node_at(tmp_path / "n", publish(learner, 0))
    second = publish(learner, 1)
    right = made(second)
    wrong = bytearray(right.path.read_bytes())
    wrong[-9] ^= 0xFF
    from blake3 import blake3

    leaves = [blake3(wrong[at : at + LEAF]).hexdigest() for at in range(0, len(wrong), LEAF)]
    fields = right.manifest.model_dump() | {"payload_blake3": blake3(wrong).hexdigest(), "leaf_hashes": leaves}
    path = tmp_path / "wrong"
    path.write_bytes(wrong)
    incoming = feed(s.begin_delta(sign(Manifest.model_validate(fields), KEY), right.whole), path)
    with pytest.raises(IntegrityError):
        incoming.complete()
    assert (s.versions, s.delta(1)) == ([0], None)
    feed(s.begin(second.snapshot.document), second.snapshot.payload_path).complete()
    assert s.versions == [1, 0]


def test_a_delta_to_other_weights_makes_none_of_a_version_that_was_signed(
    tmp_path: Path, learner: SnapshotStore
) -> None:
    """In order in itself, and as long as the right one."""
    first = publish(learner, 0)
    s, right = node_at(tmp_path / "n", first), made(publish(learner, 1))
    elsewhere = make(tmp_path / "elsewhere")
    publish(elsewhere, 0)
    state = torch.ones(4000)
    state[:7] += 2
    other = made(elsewhere.publish({"w": state}, version=1, key=KEY))
    with pytest.raises(IntegrityError, match="leads to something else"):
        s.begin_delta(other.document, right.whole)
    claims = sign(other.manifest.model_copy(update={"delta": right.manifest.delta}), KEY)
    with pytest.raises(IntegrityError, match="gives another payload"):
        feed(s.begin_delta(claims, right.whole), other.path).complete()
    assert (s.versions, s.delta(1)) == ([0], None)


def test_a_base_that_is_damaged_on_disk_goes_with_the_delta_that_showed_it(
    tmp_path: Path, learner: SnapshotStore
) -> None:
    """Else no delta would ever lead on from it."""
    first = publish(learner, 0)
    s, second = node_at(tmp_path / "n", first), publish(learner, 1)
    base = s.get(0)
    assert base is not None
    damaged = bytearray(base.payload_path.read_bytes())
    damaged[-1] ^= 1
    base.payload_path.write_bytes(damaged)
    with pytest.raises(IntegrityError):
        feed(s.begin_delta(made(second).document, made(second).whole), made(second).path).complete()
    assert s.versions == []
    assert not base.payload_path.exists()
    feed(s.begin(second.snapshot.document), second.snapshot.payload_path).complete()
    assert s.versions == [1]


def test_the_chain_is_kept_while_it_is_shorter_than_the_whole(tmp_path: Path) -> None:
    s = make(tmp_path, keep_deltas=5)
    full = publish(s, 0).snapshot.manifest.payload_bytes
    for version in range(1, 9):
        publish(s, version)
    kept = [v for v in range(9) if s.delta(v) is not None]
    assert kept == [4, 5, 6, 7, 8]
    assert sum(made_.manifest.payload_bytes for v in kept if (made_ := s.delta(v))) < full
    assert s.versions == [8, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["7", "8", *(f"{v}.delta" for v in kept)])


def test_a_learner_that_resumes_from_long_ago_goes_on_from_what_it_published(tmp_path: Path) -> None:
    """The base is the newest version that was published, whatever checkpoint the weights come from."""
    s = make(tmp_path, keep_deltas=2)
    for version in range(6):
        publish(s, version)
    again = make(tmp_path, keep_deltas=2)
    state = torch.ones(4000)
    state[:3] += 1  # as it was soon after v0
    resumed = again.publish({"w": state}, version=6, key=KEY)
    assert made(resumed).base == 5
    n = node_at(tmp_path / "n", again.published(again.get(5) or resumed.snapshot))
    got = feed(n.begin_delta(made(resumed).document, made(resumed).whole), made(resumed).path).complete()
    assert got.payload_path.read_bytes() == resumed.snapshot.payload_path.read_bytes()


def test_a_learner_that_lost_its_folder_publishes_whole(tmp_path: Path) -> None:
    assert publish(make(tmp_path), 7).note == "there is no version before it here"


def test_where_the_delta_would_not_pay_the_version_goes_whole_and_says_why(tmp_path: Path) -> None:
    s = make(tmp_path)
    publish(s, 0)
    other = s.publish({"w": torch.randn(4000, generator=torch.Generator().manual_seed(1))}, version=1, key=KEY)
    assert other.delta is None
    assert other.share is not None
    assert other.share > 0.7
    assert "of the full" in other.note
    shape = s.publish({"v": torch.ones(4000)}, version=2, key=KEY)
    assert (shape.delta, shape.note) == (None, "its tensors are not those of v1")


def test_a_spoiled_delta_on_disk_is_not_served(tmp_path: Path) -> None:
    s = make(tmp_path)
    publish(s, 0)
    path = made(publish(s, 1)).path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = make(tmp_path)
    assert (again.delta(1), again.versions) == (None, [1, 0])
    assert not path.exists()


@pytest.mark.parametrize(
    ("payload", "size"),
    [(1, 128 << 10), (100_000_000, 128 << 10), (2 << 30, 128 << 10), (16_000_000_000, 1 << 20), (2**45, 16 << 20)],
)
def test_large_payloads_have_larger_leaves(payload: int, size: int) -> None:
    """So that a manifest stays small beside a delta."""
    assert leaf_bytes_for(payload, 128 << 10, 16 << 20) == size


@pytest.mark.parametrize(
    ("at_least", "chunk", "size"),
    [
        (128 << 10, 1 << 30, 16 << 20),  # no leaf is larger
        (128 << 10, 1 << 20, 1 << 20),  # than a chunk either
        (96 << 10, 288 << 10, 96 << 10),  # and chunks are of whole leaves
    ],
)
def test_leaves_grow_as_far_as_a_chunk_and_the_protocol_allow(at_least: int, chunk: int, size: int) -> None:
    assert leaf_bytes_for(2**45, at_least, chunk) == size
