"""Names of tasks and where their files come from: the service's own folder or store, fixed when the job is created."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from app.protocol.errors import BadInput, IntegrityError
from app.protocol.task_spec import TaskFile, TaskLimits, TaskSpec
from app.storage.stores import FolderStore
from app.tasks.build import build
from app.tasks.files import TaskIntake, fetch_files
from app.tasks.registry import check_task, load_task
from app.tasks.sandbox import SandboxTask

SOURCE = """
from app.tasks.base import Prompt

class Sum:
    name, train_size, heldout_size = "sum", 4, 4
    def __init__(self, params, seed):
        if "wrong" in params:
            raise KeyError("wrong")
    def train(self, index): return Prompt(index, f"1+{index}", {})
    def heldout(self, index): return Prompt(index, f"2+{index}", {})
    def reward(self, prompt, text): return float(text == "VERSION")
"""
ROWS = "\n".join(json.dumps({"prompt": f"q{i}", "answer": str(i)}) for i in range(40))


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


@pytest.fixture
def task_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "sum.py").write_text(SOURCE.replace("VERSION", "one"))
    (folder / "rows.jsonl").write_text(ROWS)
    (tmp_path / "outside.py").write_text(SOURCE)
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    (folder / "empty.py").write_text("")
    (folder / "loop.py").symlink_to("loop.py")
    (folder / "huge.py").write_bytes(b"#" * ((1 << 20) + 1))
    with (folder / "huge.jsonl").open("wb") as sparse:
        sparse.truncate((2 << 30) + 1)
    return folder


def test_a_job_keeps_the_source_that_it_was_created_with(task_dir: Path, store: FolderStore, tmp_path: Path):
    taken = TaskIntake(task_dir, store)(TaskSpec(name="deep/sum.py:Sum", limits={"processes": 1}), "job-1")
    (task_dir / "deep" / "sum.py").write_text(SOURCE.replace("VERSION", "two"))
    [file] = taken.files
    assert (file.role, file.size) == ("source", len(SOURCE.replace("VERSION", "one")))
    assert store.head(file.key("job-1")) is not None
    folder = fetch_files(store.get_file, "job-1", taken, tmp_path / "learner")
    task = load_task(taken, 0, folder)
    assert isinstance(task, SandboxTask)
    assert [task.reward(task.train(0), text) for text in ("one", "two")] == [1.0, 0.0]
    task.close()
    again = TaskIntake(task_dir, store)(TaskSpec(name="deep/sum.py:Sum"), "job-1")
    assert again.files[0].key("job-1") != file.key("job-1")


def test_the_source_never_runs_in_the_process_that_asks(task_dir: Path, store: FolderStore):
    (task_dir / "loud.py").write_text("import sys\nsys.modules['echo2_was_here'] = sys\n" + SOURCE)
    TaskIntake(task_dir, store)(TaskSpec(name="loud.py:Sum"), "job-1")
    assert "echo2_was_here" not in sys.modules


def test_what_the_store_gives_must_be_what_was_created(task_dir: Path, store: FolderStore, tmp_path: Path):
    taken = TaskIntake(task_dir, store)(TaskSpec(name="deep/sum.py:Sum"), "job-1")
    store.put(taken.files[0].key("job-1"), b"import os")
    with pytest.raises(IntegrityError, match=r"source\.py"):
        fetch_files(store.get_file, "job-1", taken, tmp_path / "learner")
    assert list((tmp_path / "learner").iterdir()) == []
    assert fetch_files(store.get_file, "job-1", TaskSpec(name="poker"), tmp_path / "learner") is None


def test_what_lies_there_already_is_not_fetched_again(task_dir: Path, store: FolderStore, tmp_path: Path):
    taken = TaskIntake(task_dir, store)(TaskSpec(name="deep/sum.py:Sum"), "job-1")
    fetch_files(store.get_file, "job-1", taken, tmp_path / "learner")
    store.delete(taken.files[0].key("job-1"))
    assert fetch_files(store.get_file, "job-1", taken, tmp_path / "learner") == tmp_path / "learner"


@pytest.mark.parametrize(
    ("name", "params", "says", "pointer"),
    [
        ("../outside.py:Sum", {}, "below ECHO2_TASK_DIR", "/task/name"),
        ("/etc/x.py:Sum", {}, "below ECHO2_TASK_DIR", "/task/name"),
        ("link.py:Sum", {}, "leads out of ECHO2_TASK_DIR", "/task/name"),
        ("sum.py:Sum", {}, "there is no file 'sum.py'", "/task/name"),
        ("deep/sum.py", {}, "names no class", "/task/name"),
        ("deep/sum.py:", {}, "name of a class", "/task/name"),
        ("deep/sum.py:Sum.x", {}, "name of a class", "/task/name"),
        ("empty.py:Sum", {}, "0 bytes", "/task/name"),
        ("huge.py:Sum", {}, "1048577 bytes; 1 to 1048576 are taken", "/task/name"),
        ("loop.py:Sum", {}, "can't be read", "/task/name"),
        ("deep/sum.py/x.py:Sum", {}, "there is no file", "/task/name"),
        ("jsonl", {"train": "huge.jsonl"}, "2147483649 bytes", "/task/params/train"),
        ("jsonl", {"train": "x" * 5000}, "File name too long", "/task/params/train"),
        ("jsonl", {"train": "\ud800"}, "can't be read", "/task/params/train"),
        ("jsonl", {"train": "a\0b"}, "zero byte", "/task/params/train"),
        ("deep/sum.py:Sum", {"wrong": 1}, "refuses its parameters: KeyError", "/task/params"),
        ("pokr", {}, "did you mean poker", "/task/name"),
        ("jsonl", {"train": "none.jsonl"}, "there is no file", "/task/params/train"),
        ("jsonl", {"train": "../objects"}, "leads out of", "/task/params/train"),
        ("jsonl", {"train": "store:jobs/x"}, "must begin with tasks/", "/task/params/train"),
        ("jsonl", {"train": "store:tasks/none"}, "has no 'tasks/none'", "/task/params/train"),
        ("jsonl", {"train": "rows.jsonl", "heldout": "rows.jsonl"}, "40 held-out prompts", "/task/params/heldout"),
    ],
)
def test_what_is_wrong_is_named(task_dir: Path, store: FolderStore, name: str, params: Any, says: str, pointer: str):
    with pytest.raises(BadInput) as caught:
        TaskIntake(task_dir, store)(TaskSpec(name=name, params=params), "job-1")
    assert says in caught.value.detail
    assert caught.value.errors[0].pointer == pointer
    assert list(store.list("jobs/")) == []


class CopiesNothing(FolderStore):
    """Says how large its objects are, and fails when one is read."""

    def get_file(self, key: str, path: Path) -> None:
        raise AssertionError(f"{key} was read")


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path):
    store = CopiesNothing(tmp_path / "objects")
    store.put("tasks/huge", b"")
    with store.path("tasks/huge").open("wb") as sparse:
        sparse.truncate((2 << 30) + 1)
    with pytest.raises(BadInput, match="2147483649 bytes"):
        TaskIntake(None, store)(TaskSpec(name="jsonl", params={"train": "store:tasks/huge"}), "job-1")


class NoBytes(FolderStore):
    """Has no memory for an object: it can be copied block by block, and not read whole."""

    def get(self, key: str, most: int | None = None) -> bytes:
        raise AssertionError(f"{key} was read into memory")


def test_rows_of_the_store_are_never_whole_in_memory(tmp_path: Path):
    store = NoBytes(tmp_path / "objects")
    store.put("tasks/rows", b"".join(b'{"prompt": "p%d", "answer": 1}\n' % n for n in range(50)))
    taken = TaskIntake(None, store)(TaskSpec(name="jsonl", params={"train": "store:tasks/rows"}), "job-1")
    assert [f.role for f in taken.files] == ["train"]
    assert store.head(taken.files[0].key("job-1")) is not None


def test_who_posts_a_task_that_loads_for_ever_is_not_kept_for_an_hour(
    task_dir: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.tasks.files.LOAD_S", 1.0)
    (task_dir / "slow.py").write_text("import time\ntime.sleep(60)\n")
    spec = TaskSpec(name="slow.py:Slow", limits=TaskLimits(load_timeout_s=3600, processes=1))
    began = time.monotonic()
    with pytest.raises(BadInput, match="can't be used"):
        TaskIntake(task_dir, store)(spec, "job-1")
    assert time.monotonic() - began < 20
    monkeypatch.setattr("app.tasks.files.LOAD_S", 60.0)
    quick = spec.model_copy(update={"name": "deep/sum.py:Sum"})
    assert TaskIntake(task_dir, store)(quick, "job-1").limits.load_timeout_s == 3600, "later on its own limit holds"


def test_a_service_without_a_folder_says_which_setting(store: FolderStore):
    with pytest.raises(BadInput, match="set ECHO2_TASK_DIR"):
        TaskIntake(None, store)(TaskSpec(name="sum.py:Sum"), "job-1")


def test_an_owner_can_not_name_files_himself(store: FolderStore):
    forged = TaskFile(role="source", size=1, blake3="0" * 64)
    with pytest.raises(BadInput, match="filled in by the service") as caught:
        TaskIntake(None, store)(TaskSpec(name="poker", files=[forged]), "job-1")
    assert caught.value.errors[0].pointer == "/task/files"


def test_rows_come_from_folder_and_store_alike(task_dir: Path, store: FolderStore, tmp_path: Path):
    store.put("tasks/held.jsonl", b'{"prompt": "other", "answer": 1}\n')
    spec = TaskSpec(name="jsonl", params={"train": "rows.jsonl", "heldout": "store:tasks/held.jsonl"})
    taken = TaskIntake(task_dir, store)(spec, "job-1")
    assert [(f.role, f.size) for f in taken.files] == [("train", len(ROWS)), ("heldout", 33)]
    assert taken.files[0].blake3 == blake3(ROWS.encode()).hexdigest()
    task = load_task(taken, 0, fetch_files(store.get_file, "job-1", taken, tmp_path / "there"))
    assert (task.train_size, task.heldout_size) == (40, 1)


def test_an_installed_plug_in_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Found without being imported; its process, which has no path of ours, then does not know it."""
    (tmp_path / "echo2_sum_task.py").write_text(SOURCE)
    info = tmp_path / "echo2_sum_task-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo2-sum-task\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[echo2.tasks]\nsum = echo2_sum_task:Sum\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(BadInput, match=r"known tasks: .*poker.*sum"):
        check_task(TaskSpec(name="nothing"))
    with pytest.raises(BadInput, match="task 'sum' is not known"):
        check_task(TaskSpec(name="sum"))
    assert "echo2_sum_task" not in sys.modules
    assert build(TaskSpec(name="sum"), 0).train(2).text == "1+2"
