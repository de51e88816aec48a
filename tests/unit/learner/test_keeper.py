"""Checkpoints reach the object store beside the training, count only when they are whole, and come back from there."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import MARKER, expected, latest, save
from app.learner.keeper import Keeper, fetch_newer, fetch_step, stored_steps, take_best
from app.learner.outbox import Directives, Outbox
from app.learner.resume import fetch_checkpoint, resume
from app.learner.trainer import GRPOTrainer, TrainerState
from app.protocol.errors import LearnerError, Unavailable
from app.protocol.learner import StartAnswer
from app.storage.stores import FolderStore
from tests.unit.learner.fakes import FakeControl
from tests.unit.learner.samples import job, random_model
from tests.unit.learner.test_checkpoints import checkpoint

PREFIX = "jobs/j/checkpoints/"


class SlowStore(FolderStore):
    """`gate` closed holds uploads back; `error` is raised by them. Nothing large is handed out in one piece: a
    checkpoint of a 7B model has 84 GB."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def get(self, key: str, most: int | None = None) -> bytes:
        assert not key.endswith(".safetensors")
        return super().get(key, most)

    def put_file(self, key: str, path: Path) -> None:
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        super().put_file(key, path)


def setup(tmp_path: Path, **options) -> tuple[SlowStore, Path, Keeper]:
    store, root = SlowStore(tmp_path / "objects"), tmp_path / "work" / "checkpoints"
    keeper = Keeper(store, PREFIX, root, **{"every": 1, **options})
    return store, root, keeper


def until(what) -> None:
    done = threading.Event()
    for _ in range(400):
        if what():
            return
        done.wait(0.05)
    raise AssertionError("waited 20 s in vain")


def test_every_second_one_is_brought_there_and_the_newest_two_stay(tmp_path: Path):
    told: list[int] = []
    store, root, keeper = setup(tmp_path, every=2, also=lambda: told.append(1))
    keeper.start()
    for step in range(1, 9):
        save(root, checkpoint(step))
        keeper.saved(step)
        if step % 2 == 0:
            until(lambda wanted=step // 2: len(told) == wanted)
    keeper.stop()
    assert stored_steps(store, PREFIX) == [8, 6]
    assert {i.key.split("/")[3] for i in store.list(PREFIX)} == {"6", "8"}
    assert list((root.parent / "uploading").iterdir()) == []


def test_none_means_none(tmp_path: Path):
    store, root, keeper = setup(tmp_path, every=None)
    keeper.start()
    save(root, checkpoint(1))
    keeper.saved(1)
    keeper.stop()
    assert stored_steps(store, PREFIX) == []


def test_a_slow_upload_holds_nothing_up_and_outlives_its_folder(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    store.gate.clear()
    keeper.start()
    save(root, checkpoint(1))
    keeper.saved(1)
    assert store.entered.wait(20)
    for step in (2, 3, 4, 5):
        save(root, checkpoint(step))
        keeper.saved(step)
    assert not (root / "000000001").exists()
    store.gate.set()
    until(lambda: stored_steps(store, PREFIX) == [5, 1])
    keeper.stop()
    other = tmp_path / "elsewhere"
    assert fetch_newer(store, PREFIX, other) == 5
    read = latest(other, job_id="j")
    assert read is not None
    assert read.progress.step == 5


def test_a_store_that_is_away_is_tried_again_with_the_next(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    store.error = Unavailable("away")
    keeper.start()
    save(root, checkpoint(1))
    keeper.saved(1)
    until(lambda: keeper.failures == 1)
    store.error = None
    save(root, checkpoint(2))
    keeper.saved(2)
    until(lambda: stored_steps(store, PREFIX) == [2])
    keeper.stop()


def test_the_best_goes_along_and_stays(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    save(root, checkpoint(1, best_step=1, best_reward=0.9))
    for step in (2, 3, 4):
        folder = save(root, checkpoint(step, best_step=1, best_reward=0.9))
    assert sorted(p.name for p in root.iterdir()) == ["000000001", "000000003", "000000004"]
    keeper.put(4, folder)
    assert stored_steps(store, PREFIX) == [4, 1]
    for step in (5, 6, 7):
        keeper.put(step, save(root, checkpoint(step, best_step=1, best_reward=0.9)))
    assert stored_steps(store, PREFIX) == [7, 6, 1]


class Traced(FolderStore):
    """What was put there and taken away, in order, as `STEP/NAME`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts: list[str] = []
        self.deletes: list[str] = []

    def put_file(self, key: str, path: Path) -> None:
        self.puts.append(key.removeprefix(PREFIX))
        super().put_file(key, path)

    def delete(self, key: str) -> None:
        self.deletes.append(key.removeprefix(PREFIX))
        super().delete(key)


def test_nothing_is_brought_there_twice(tmp_path: Path):
    """A checkpoint may be a hundred gigabytes, and the best one is its own best."""
    store, root = Traced(tmp_path / "objects"), tmp_path / "work" / "checkpoints"
    keeper = Keeper(store, PREFIX, root, every=1)
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        keeper.put(step, save(root, checkpoint(step, best_step=best, best_reward=0.9)))
    assert len(store.puts) == len(set(store.puts)) == 4 * 4
    assert stored_steps(store, PREFIX) == [4, 3]


def test_what_is_taken_away_stops_counting_before_any_of_its_files_goes(tmp_path: Path):
    store, root = Traced(tmp_path / "objects"), tmp_path / "work" / "checkpoints"
    keeper = Keeper(store, PREFIX, root, every=1, keep=1)
    keeper.put(1, save(root, checkpoint(1)))
    store.deletes.clear()
    keeper.put(2, save(root, checkpoint(2)))
    gone = [name for name in store.deletes if name.startswith("1/")]
    assert gone[0] == "1/COMMIT"
    assert set(gone[1:]) >= {"1/model.safetensors", "1/optimizer.safetensors", "1/state.json"}


def test_a_new_machine_goes_on_from_the_store(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    keeper.put(6, save(root, checkpoint(6)))
    new = tmp_path / "new"
    assert fetch_newer(store, PREFIX, new) == 6
    read = expected(new, job_id="j", last_step=7, published_version=6)
    assert read is not None
    assert torch.equal(read.weights["w"], torch.full((3,), 6.0))
    assert fetch_newer(store, PREFIX, new) is None


def test_an_older_one_does_not_replace_what_is_here(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    keeper.put(6, save(root, checkpoint(6)))
    save(root, checkpoint(8))
    assert fetch_newer(store, PREFIX, root) is None


def test_without_any_where_one_is_expected_it_is_an_error(tmp_path: Path):
    store, root, _ = setup(tmp_path)
    assert fetch_newer(store, PREFIX, root) is None
    with pytest.raises(LearnerError, match="holds no checkpoint"):
        expected(root, job_id="j", last_step=3, published_version=2)


@pytest.mark.parametrize(
    "damage", ["no marker", "a file is gone", "another file", "the marker is not JSON", "the marker is a list"]
)
def test_a_damaged_one_in_the_store_is_passed_over(tmp_path: Path, damage: str):
    store, root, keeper = setup(tmp_path)
    for step in (4, 6):
        keeper.put(step, save(root, checkpoint(step)))
    key = f"{PREFIX}6/"
    if damage == "no marker":
        store.delete(key + MARKER)
    elif damage == "a file is gone":
        store.delete(key + "optimizer.safetensors")
    elif damage == "another file":
        store.put(key + "model.safetensors", b"x")
    else:
        store.put(key + MARKER, b"{" if "JSON" in damage else b"[]")
    new = tmp_path / "new"
    assert fetch_newer(store, PREFIX, new) == 4
    assert [p.name for p in new.iterdir()] == ["000000004"]


def test_one_of_a_course_that_was_left_is_not_even_fetched(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    for step in (4, 9):
        keeper.put(step, save(root, checkpoint(step)))
    new = tmp_path / "new"
    assert fetch_newer(store, PREFIX, new, last_step=6) == 4


def test_one_that_was_put_there_stays_whatever_is_newer(tmp_path: Path):
    store, root, keeper = setup(tmp_path, keep=1)
    keeper.put(9, save(root, checkpoint(9)))
    store.put(f"{PREFIX}9/model.safetensors", b"damaged")
    keeper.put(6, save(root, checkpoint(6)))
    assert stored_steps(store, PREFIX) == [9, 6]
    assert fetch_newer(store, PREFIX, tmp_path / "new") == 6


def test_what_is_damaged_here_and_whole_in_the_store_comes_from_there(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    save(root, checkpoint(4))
    folder = save(root, checkpoint(6))
    keeper.put(6, folder)
    (folder / "model.safetensors").write_bytes(b"")
    trainer = Remembering()
    control = FakeControl()
    outbox = Outbox(control, Directives(control.word))  # type: ignore[arg-type]
    answer = StartAnswer(
        job_id="j", epoch=2, spec=job(), relay_token="t", last_step=6, published_version=6, model_revision=None
    )
    resume(answer, root, trainer, ReplayBuffer(), outbox, lambda: fetch_checkpoint(store, PREFIX, root, 6))
    assert trainer.steps == 6


class Remembering:
    steps = 0

    def restore(self, state: TrainerState) -> None:
        self.steps = state.steps
        assert torch.equal(state.weights["w"], torch.full((3,), float(state.steps)))


def test_the_marker_goes_first_when_a_step_is_put_again(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    keeper.put(6, save(root, checkpoint(6)))
    store.error = Unavailable("in the middle")
    with pytest.raises(Unavailable):
        keeper.put(6, save(root, checkpoint(6)))
    assert stored_steps(store, PREFIX) == []


def test_the_best_weights_are_what_the_job_ends_with(tmp_path: Path):
    from app.learner.checkpoints import Checkpoint, Progress

    trainer = GRPOTrainer(random_model(), job())
    good = trainer.state()
    progress = Progress(job_id="j", step=2, best_step=2, best_reward=0.5)
    save(tmp_path, Checkpoint(progress, good.weights, good.optimizer, torch.random.get_rng_state()))
    trainer.restore(type(good)(9, {n: t + 1 for n, t in good.weights.items()}, {}))
    assert "the final model is v2, the best with 0.500" in take_best(trainer, tmp_path, (2, 0.5))
    assert all(torch.equal(t, good.weights[n]) for n, t in trainer.state().weights.items())
    assert take_best(trainer, tmp_path, (2, 0.5)) == ""
    assert "is lost" in take_best(trainer, tmp_path, (1, 0.9))


def test_what_a_killed_learner_left_half_uploaded_goes(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    for step, name in [(4, "model.safetensors"), (8, "state.json")]:
        store.put(f"{PREFIX}{step}/{name}", b"half")
    keeper.put(6, save(root, checkpoint(6)))
    left = {info.key.removeprefix(PREFIX).partition("/")[0] for info in store.list(PREFIX)}
    assert left == {"6", "8"}, "a newer one may be on its way"


def test_the_best_of_another_machine_comes_from_the_store(tmp_path: Path):
    store, root, keeper = setup(tmp_path)
    save(root, checkpoint(2, best_step=2, best_reward=0.5))
    keeper.put(6, save(root, checkpoint(6, best_step=2, best_reward=0.5)))
    new = tmp_path / "new"
    assert fetch_newer(store, PREFIX, new) == 6
    trainer = Remembering()
    trainer.steps = 8
    said = take_best(trainer, new, (2, 0.5), lambda step: fetch_step(store, PREFIX, new, step))
    assert (trainer.steps, "the final model is v2" in said) == (2, True)
    assert "is lost" in take_best(trainer, new, (4, 0.9), lambda step: fetch_step(store, PREFIX, new, step))


def test_state_json_of_both_formats(tmp_path: Path):
    folder = save(tmp_path, checkpoint(7, best_step=3, best_reward=0.5))
    state = json.loads((folder / "state.json").read_text())
    assert (state["format"], state["best_step"]) == (4, 3)
