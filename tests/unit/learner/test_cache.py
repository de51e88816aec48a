"""A learner that starts again does not fetch what it has, and never trusts it unseen."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3

from app.learner.buffer import ReplayBuffer
from app.learner.cache import FileCache
from app.learner.inbox import GroupReader, Inbox
from app.learner.outbox import Directives
from app.storage.stores import FolderStore
from tests.unit.learner.samples import VOCABULARY, group
from tests.unit.learner.test_inbox import WORD, Index, prompt_ids, reference


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


class CountingStore(FolderStore):
    fetched = 0

    def get(self, key: str, most: int | None = None) -> bytes:
        self.fetched += 1
        return super().get(key, most)


def learner(tmp_path: Path, store: CountingStore) -> tuple[Inbox, ReplayBuffer]:
    """What a new process has."""
    buffer = ReplayBuffer()
    cache = FileCache(tmp_path / "cache", 1 << 20)
    reader = GroupReader(store, prompt_ids, group_size=4, max_tokens=8, vocabulary=VOCABULARY, cache=cache)
    return Inbox(Index(), reader, buffer, Directives(WORD)), buffer  # type: ignore[arg-type]


@pytest.mark.parametrize("killed", ["downloaded", "taken", "dropped as stale"])
def test_nothing_is_lost_and_nothing_is_fetched_twice(tmp_path: Path, killed: str):
    """Whatever was done with a group before its step was on record, the index hands it out to the next process."""
    store = CountingStore(tmp_path / "objects")
    ref = reference(store, [group("a")])
    inbox, buffer = learner(tmp_path, store)
    inbox.take(ref)
    if killed == "taken":
        assert len(buffer.take(0, 3, 1)[0]) == 1
    elif killed == "dropped as stale":
        assert len(buffer.evict(9, 3)) == 1
    again, fresh = learner(tmp_path, store)
    again.take(ref)
    assert [g.work_item for g in fresh.take(0, 3, 1)[0]] == ["a"]
    assert store.fetched == 1


def test_a_damaged_file_is_fetched_again(tmp_path: Path):
    store = CountingStore(tmp_path / "objects")
    ref = reference(store, [group("a")])
    learner(tmp_path, store)[0].take(ref)
    (kept,) = (tmp_path / "cache").iterdir()
    data = bytearray(kept.read_bytes())
    data[9] ^= 1
    kept.write_bytes(bytes(data))
    inbox, buffer = learner(tmp_path, store)
    inbox.take(ref)
    assert len(buffer) == 1
    assert store.fetched == 2


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path):
    cache = FileCache(tmp_path, 250)
    files = [bytes([i]) * 100 for i in range(3)]
    for data in files[:2]:
        cache.put(digest(data), data)
    assert cache.get(digest(files[0]), 100) == files[0]
    cache.put(digest(files[2]), files[2])
    assert cache.get(digest(files[1]), 100) is None
    assert cache.get(digest(files[0]), 100) == files[0]
    assert cache.get(digest(files[2]), 100) == files[2]
    cache.put(digest(b"x" * 251), b"x" * 251)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 250


@pytest.mark.parametrize("damaged", [False, True])
def test_a_cache_that_may_only_be_read_costs_a_download_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
):
    store = CountingStore(tmp_path / "objects")
    ref = reference(store, [group("a")])
    learner(tmp_path, store)[0].take(ref)
    (kept,) = (tmp_path / "cache").iterdir()
    if damaged:
        kept.write_bytes(b"")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    inbox, buffer = learner(tmp_path, store)
    inbox.take(ref)
    assert [g.work_item for g in buffer.take(0, 3, 1)[0]] == ["a"]
    assert store.fetched == 2


def test_no_cache_and_no_disk_are_fine(tmp_path: Path):
    none = FileCache(tmp_path / "none", 0)
    none.put(digest(b"a"), b"a")
    assert none.get(digest(b"a"), 1) is None
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    FileCache(blocked, 100).put(digest(b"a"), b"a")
