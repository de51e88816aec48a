"""What a relay announces and lets others read, and what it finds and keeps when its folder is opened again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from app.protocol.errors import BadInput
from app.snapshots import Snapshot, SnapshotStore
from app.snapshots.deltas import DeltaFile
from tests.unit.snapshots.test_delta_store import LEAF, feed, made, make, publish

torch.set_num_threads(1)


def learner_at(root: Path, versions: int) -> tuple[SnapshotStore, list[Snapshot], list[DeltaFile]]:
    """A learner that has published so many versions: all of them, and the deltas that lead to all but the first."""
    s = make(root, keep=versions)
    published = [publish(s, version) for version in range(versions)]
    return s, [p.snapshot for p in published], [made(p) for p in published[1:]]


def test_whoever_has_the_base_is_led_on_by_the_delta_and_others_get_the_version(tmp_path: Path) -> None:
    s, (_, first), (delta,) = learner_at(tmp_path, 2)
    led = s.announce(0, [0])
    assert led is not None
    assert (led.version, led.document, led.delta) == (1, first.document, delta.document)
    for held in ([], [7]):
        whole = s.announce(0, held)
        assert whole is not None
        assert (whole.version, whole.document, whole.delta) == (1, first.document, b"")
    assert s.announce(1, [1]) is None


def test_a_delta_that_is_arriving_is_announced_and_read_while_it_arrives(tmp_path: Path) -> None:
    _, (base, first), (delta,) = learner_at(tmp_path / "l", 2)
    s = make(tmp_path / "n")
    feed(s.begin(base.document), base.payload_path).complete()
    assert s.open_delta(1) is None
    incoming = s.begin_delta(delta.document, delta.whole)
    told = s.announce(0, [0])
    assert told is not None
    assert (told.version, told.document, told.delta) == (1, first.document, delta.document)
    assert s.announce(0) is None, "without the base nothing can be made of it yet"
    assert s.open(1) is None, "the version itself is not here"
    assert s.open_delta(2) is None
    reader = s.open_delta(1)
    assert reader is not None
    assert (reader.ready, reader.over) == (0, False)
    feed(incoming, delta.path)
    assert reader.read(0) == delta.path.read_bytes()[:LEAF]
    incoming.complete()
    whole = s.open_delta(1)
    assert whole is not None
    with whole:
        assert (whole.ready, whole.over) == (delta.manifest.leaves, True)


def test_what_was_given_up_is_neither_announced_nor_read(tmp_path: Path) -> None:
    _, (base, first), (delta,) = learner_at(tmp_path / "l", 2)
    whole, stepwise = make(tmp_path / "whole"), make(tmp_path / "stepwise")
    feed(stepwise.begin(base.document), base.payload_path).complete()
    for s, incoming in (
        (whole, whole.begin(first.document)),
        (stepwise, stepwise.begin_delta(delta.document, delta.whole)),
    ):
        incoming.close()
        assert s.announce(0, [0]) is None
        assert s.open(1) is None
        assert s.open_delta(1) is None


def test_a_version_stays_until_the_last_of_its_readers_is_gone(tmp_path: Path) -> None:
    s = make(tmp_path, keep=1)
    publish(s, 0)
    one, other = s.open(0), s.open(0)
    assert one is not None
    assert other is not None
    one.close()
    one.close()
    publish(s, 1)
    assert s.versions == [1, 0]
    other.close()
    with s.pin(1):
        pass
    publish(s, 2)
    assert s.versions == [2], "nobody reads either of them any more"


def test_at_least_one_version_is_kept(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least 1, not 0"):
        make(tmp_path, keep=0)


def test_deltas_that_are_too_many_are_removed_when_the_folder_is_opened(tmp_path: Path) -> None:
    learner_at(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.glob("*.delta")) == ["1.delta", "2.delta", "3.delta", "4.delta"]
    s = make(tmp_path, keep_deltas=2)
    assert sorted(p.name for p in tmp_path.glob("*.delta")) == ["3.delta", "4.delta"]
    assert [version for version in range(5) if s.delta(version)] == [3, 4]


@pytest.mark.parametrize(("version", "kept"), [(1, False), (2, False), (3, True)])
def test_of_what_was_arriving_only_what_is_newer_than_all_that_is_complete_is_gone_on_with(
    version: int, kept: bool, tmp_path: Path
) -> None:
    _, snapshots, _ = learner_at(tmp_path / "l", 4)
    for complete in (0, 2):
        shutil.copytree(tmp_path / "l" / str(complete), tmp_path / "n" / str(complete))
    make(tmp_path / "half").begin(snapshots[version].document)
    part = tmp_path / "n" / f"{version}.part"
    shutil.copytree(tmp_path / "half" / part.name, part)
    assert make(tmp_path / "n").versions == [2, 0]
    assert part.exists() is kept


def test_a_leftover_that_was_being_written_is_removed(tmp_path: Path) -> None:
    publish(make(tmp_path), 0)
    (tmp_path / "1.new").mkdir()
    make(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
