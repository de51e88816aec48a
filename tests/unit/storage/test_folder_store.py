"""The folder store through its public interface: whole objects or none, inside its folder, in key order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import BadInput, Conflict, NotFound, TooLarge, Unavailable
from app.storage.objects import ObjectInfo
from app.storage.stores import TEMP_FOLDER, FolderStore, open_store

TRAVERSALS = ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/.", "a\\..\\b", "a\0b", "a/", "x" * 901]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


def keys(store: FolderStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_object_reads_as_written_and_can_be_replaced(store: FolderStore) -> None:
    store.put("jobs/a/x.bin", b"one")
    store.put("jobs/a/x.bin", b"second")
    assert store.get("jobs/a/x.bin") == b"second"
    assert store.head("jobs/a/x.bin") == ObjectInfo("jobs/a/x.bin", 6)
    assert store.path("jobs/a/x.bin").read_bytes() == b"second"


def test_a_file_is_copied(store: FolderStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    store.put_file("big", source)
    assert store.get("big") == source.read_bytes()
    with pytest.raises(FileNotFoundError):
        store.put_file("none", tmp_path / "absent")
    assert keys(store) == ["big"]


def test_an_object_that_is_larger_than_its_reader_expects_is_not_read(store: FolderStore) -> None:
    store.put("x", b"four")
    assert store.get("x", 4) == store.get("x", 5) == b"four"
    for most in (3, 0):
        with pytest.raises(TooLarge, match=f"4 bytes; at most {most}"):
            store.get("x", most)


def test_absent_objects(store: FolderStore) -> None:
    store.put("folder/x", b"")
    for key in ("no", "folder", "folder/x/y"):
        assert store.head(key) is None
        with pytest.raises(NotFound, match=key):
            store.get(key)
        store.delete(key)
    assert keys(store) == ["folder/x"]
    assert keys(store, "no/such/") == []


@pytest.mark.parametrize("key", [*TRAVERSALS, f"{TEMP_FOLDER}/x"])
def test_a_key_that_leaves_the_store_is_refused(store: FolderStore, tmp_path: Path, key: str) -> None:
    (tmp_path / "x").write_bytes(b"outside")
    for call in (
        lambda: store.get(key),
        lambda: store.put(key, b"evil"),
        lambda: store.delete(key),
        lambda: store.head(key),
        lambda: store.path(key),
    ):
        with pytest.raises(BadInput, match="not a valid object key"):
            call()
    assert files_below(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"outside"


def test_a_link_that_leads_out_is_refused_and_not_listed(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "objects" / "link").symlink_to(tmp_path)
    (tmp_path / "objects" / "file").symlink_to(tmp_path / "secret")
    for key in ("link/secret", "file"):
        with pytest.raises(BadInput, match="leaves the store"):
            store.get(key)
        with pytest.raises(BadInput, match="leaves the store"):
            store.put(key, b"evil")
    assert keys(store) == []
    assert (tmp_path / "secret").read_text() == "s"


@pytest.mark.parametrize("prefix", ["../", "/etc/", "a/../../"])
def test_a_prefix_that_leaves_the_store_is_refused(store: FolderStore, prefix: str) -> None:
    with pytest.raises(BadInput):
        list(store.list(prefix))


def test_a_writer_that_fails_leaves_the_old_object_and_no_file(store: FolderStore, tmp_path: Path) -> None:
    store.put("a/x", b"old")

    def half() -> None:
        with store.writer("a/x") as file:
            file.write(b"half of the n")
            raise RuntimeError("client went away")

    with pytest.raises(RuntimeError, match="client went away"):
        half()
    assert store.get("a/x") == b"old"
    assert files_below(tmp_path) == ["objects/a/x"]


def test_a_process_that_dies_between_temp_and_rename_leaves_nothing(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/x", b"old")
    pid = os.fork()
    if pid == 0:
        try:
            monkeypatch.setattr("app.storage.stores.os.replace", lambda *_: os._exit(9))
            store.put("a/x", b"new")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    (left,) = (tmp_path / "objects" / TEMP_FOLDER).iterdir()
    assert left.read_bytes() == b"new"
    assert store.get("a/x") == b"old"
    assert keys(store) == ["a/x"]

    FolderStore(tmp_path / "objects")
    assert left.exists(), "a fresh one may belong to a living writer"
    os.utime(left, (1, 1))
    FolderStore(tmp_path / "objects")
    assert not left.exists()


def test_the_list_is_in_key_order_and_by_text_prefix(store: FolderStore) -> None:
    names = ["a/1", "a-b", "a.b", "a0", "b/c/d", "b/c-e", "b/ca", "é"]
    for name in names:
        store.put(name, name.encode())
    assert keys(store) == sorted(names)
    assert keys(store, "a") == sorted(n for n in names if n.startswith("a"))
    assert keys(store, "b/c") == ["b/c-e", "b/c/d", "b/ca"]
    assert keys(store, "b/c/") == ["b/c/d"]
    assert [i.size for i in store.list("a/")] == [3]


PART = st.text(st.sampled_from("ab-./0é"), min_size=1, max_size=4)


@given(st.sets(PART, max_size=12), PART | st.just(""))
def test_any_set_of_objects_lists_as_a_sorted_set(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], prefix: str
) -> None:
    store = FolderStore(tmp_path_factory.mktemp("store"))
    kept = set()
    for name in names:
        try:
            store.put(name, b"x")
        except (BadInput, Conflict):
            continue
        kept.add(name)
    try:
        listed = keys(store, prefix)
    except BadInput:
        return
    assert listed == sorted(name for name in kept if name.startswith(prefix))


def test_an_object_and_a_folder_of_the_same_name_conflict(store: FolderStore) -> None:
    store.put("a", b"1")
    with pytest.raises(Conflict):
        store.put("a/b", b"2")
    store.put("c/d", b"3")
    with pytest.raises(Conflict):
        store.put("c", b"4")
    assert keys(store) == ["a", "c/d"]


def test_empty_folders_are_in_nobodys_way(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "objects/a/b/c").mkdir(parents=True)
    store.put("a", b"1")
    store.put("d/e/f", b"2")
    store.delete("d/e/f")
    assert sorted(p.name for p in (tmp_path / "objects").iterdir()) == sorted(["a", TEMP_FOLDER])


def test_a_store_whose_folder_is_gone_says_so(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "objects" / TEMP_FOLDER).rmdir()
    (tmp_path / "objects").rmdir()
    with pytest.raises(Unavailable, match="is gone"):
        store.put("a", b"1")


def test_a_name_too_long_for_the_disk_is_bad_input(store: FolderStore) -> None:
    with pytest.raises(BadInput, match="too long"):
        store.put("x" * 300, b"")
    with pytest.raises(BadInput, match="too long"):
        store.head("x" * 300)


@pytest.mark.parametrize(
    "url",
    ["", "objects", "/abs", "file:rel", "file://host/x", "file:///", "file:///x?y", "http://x/y", "s3://", "s3:///p",
     "s3://Bucket/p", "s3://bucket/../p", "s3://bucket/p?x=1", "s3://user@bucket/p", "gs://bucket/p", "file://[", "s3://["],
)  # fmt: skip
def test_a_url_that_names_no_store_is_refused_with_what_is_accepted(url: str) -> None:
    with pytest.raises(BadInput, match=r"expected file:///absolute/path or s3://bucket/prefix"):
        open_store(url)


def test_a_folder_url_is_decoded_and_the_folder_made(tmp_path: Path) -> None:
    folder = tmp_path / "with space" / "é%"
    store = open_store(folder.as_uri())
    store.put("k", b"v")
    assert (folder / "k").read_bytes() == b"v"


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="can't be used as object store"):
        open_store((tmp_path / "file" / "below").as_uri())
