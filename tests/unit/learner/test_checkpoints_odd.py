"""Checkpoints that are odd: half replaced, of another shape, without what later programs write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.learner import checkpoints
from app.learner.checkpoints import MARKER, Progress, expected, latest, progress_of, save, steps_on_disk
from app.learner.files import hash_file
from app.learner.keeper import Keeper, fetch_step
from app.protocol.errors import LearnerError
from app.storage.stores import FolderStore
from tests.unit.learner.test_checkpoints import Killed, checkpoint, found


def test_who_died_after_replacing_a_step_can_replace_it_again(tmp_path: Path):
    def die(name: str) -> None:
        if name == "rename":
            raise Killed

    save(tmp_path, checkpoint(1))
    with pytest.raises(Killed):
        save(tmp_path, checkpoint(1), after=die)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000001", "000000001.old"]
    save(tmp_path, checkpoint(1))
    assert [p.name for p in tmp_path.iterdir()] == ["000000001"]
    assert found(tmp_path) == 1


@pytest.mark.parametrize("state", [b"[]", b"null", b"3", b"{}", b'{"job_id": "j", "step": -1}', b"not JSON"])
def test_a_state_of_another_shape_is_damage(tmp_path: Path, state: bytes):
    with pytest.raises(ValueError, match=r"state\.json has another format|Expecting value"):
        progress_of(state)
    save(tmp_path, checkpoint(1))
    folder = save(tmp_path, checkpoint(2))
    (folder / "state.json").write_bytes(state)
    marker = json.loads((folder / MARKER).read_bytes())
    marker["state.json"] = {"size": len(state), "blake3": hash_file(folder / "state.json")}
    (folder / MARKER).write_text(json.dumps(marker))
    assert found(tmp_path) == 1
    assert steps_on_disk(tmp_path) == [1]


@pytest.mark.parametrize(("last_step", "published"), [(1, None), (0, 1)])
def test_one_step_or_one_version_is_enough_to_expect_a_checkpoint(
    tmp_path: Path, last_step: int, published: int | None
):
    with pytest.raises(LearnerError, match="holds no checkpoint"):
        expected(tmp_path, job_id="j", last_step=last_step, published_version=published)
    assert expected(tmp_path, job_id="j", last_step=0, published_version=0) is None


def test_what_an_older_program_did_not_write_is_made_up_for():
    progress = progress_of(b'{"format": 1, "job_id": "j", "step": 4}')
    assert progress == Progress(format=1, job_id="j", step=4)
    assert (progress.active_s, progress.evaluated, progress.skipped, progress.undecided) == (0.0, -1, False, ())


def test_what_is_committed_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    monkeypatch.setattr(checkpoints, "fsync_path", synced.append)
    monkeypatch.setattr(checkpoints, "write_durable", lambda path, data: (path.write_bytes(data), synced.append(path)))
    before: list[str] = []
    save(
        tmp_path, checkpoint(1), after=lambda name: before.extend(p.name for p in synced) if name == "rename" else None
    )
    *files, folder = before
    assert files == ["model.safetensors", "optimizer.safetensors", "state.json", MARKER]
    assert folder.startswith(".part-")
    assert synced[-1] == tmp_path
    assert latest(tmp_path, job_id="j") is not None


def test_what_is_left_of_a_step_is_not_in_the_way_of_the_one_that_is_fetched(tmp_path: Path):
    store, root = FolderStore(tmp_path / "objects"), tmp_path / "checkpoints"
    folder = save(root, checkpoint(6))
    Keeper(store, "p/", root, every=1).put(6, folder)
    (folder / MARKER).unlink()
    assert fetch_step(store, "p/", root, 6)
    assert found(root) == 6
