"""A checkpoint is whole or does not count, whatever instant the writer dies at."""

from __future__ import annotations

import json
import math
import resource
import shutil
from pathlib import Path

import pytest
import torch

from app.learner.adaptive import State
from app.learner.checkpoints import MARKER, Checkpoint, Progress, expected, latest, save, steps_on_disk, weights_of
from app.learner.files import hash_file
from app.learner.trainer import GRPOTrainer, TrainerState
from app.protocol.errors import LearnerError
from app.protocol.learner import EvalReport, StepReport
from tests.unit.learner.samples import batch, job, random_model


class Killed(BaseException):
    """The process is gone."""


def checkpoint(step: int, job_id: str = "j", **progress) -> Checkpoint:
    return Checkpoint(
        Progress(job_id=job_id, step=step, **progress),
        {"w": torch.full((3,), float(step))},
        {"exp_avg/w": torch.ones(3), "step/w": torch.tensor(float(step))},
        torch.random.get_rng_state(),
    )


def found(root: Path) -> int | None:
    read = latest(root, job_id="j")
    if read is None:
        return None
    assert torch.equal(read.weights["w"], torch.full((3,), float(read.progress.step)))
    return read.progress.step


def operations(root: Path) -> list[str]:
    names: list[str] = []
    save(root, checkpoint(1), after=names.append)
    save(root, checkpoint(1), after=names.append)
    return names


def test_everything_comes_back(tmp_path: Path):
    report = StepReport(step=3, t_train=1.0, t_idle=0.0, reward=0.5, trained=["a"], lags={0: 8, 2: 8})
    evaluation = EvalReport(step=2, reward=0.25, prompts=10)
    written = checkpoint(3, active_s=12.5, evaluated=2, steps=[report], evals=[evaluation])
    save(tmp_path, written)
    read = latest(tmp_path, job_id="j")
    assert read is not None
    assert read.progress == written.progress
    assert read.optimizer.keys() == written.optimizer.keys()
    assert torch.equal(read.rng, written.rng)


def test_no_pickle_on_disk(tmp_path: Path):
    folder = save(tmp_path, checkpoint(1))
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json", ""}
    assert json.loads((folder / MARKER).read_bytes()).keys() == {p.name for p in folder.iterdir()} - {MARKER}


def test_only_the_newest_two_stay(tmp_path: Path):
    for step in (0, 2, 4, 6):
        save(tmp_path, checkpoint(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000004", "000000006"]


@pytest.mark.parametrize("same_step", [False, True])
def test_killed_between_any_two_file_operations_the_newest_whole_one_counts(tmp_path: Path, same_step: bool):
    for number, _ in enumerate(operations(tmp_path / "dry")):
        root = tmp_path / str(number)
        save(root, checkpoint(1))
        save(root, checkpoint(2))
        left = number

        def die(name: str) -> None:
            nonlocal left
            if left == 0:
                raise Killed(name)
            left -= 1

        step = 2 if same_step else 3
        try:
            save(root, checkpoint(step), after=die)
            finished = True
        except Killed as killed:
            finished = str(killed) == "rename"
        assert found(root) == (step if finished else 2)
        save(root, checkpoint(4))
        assert found(root) == 4
        assert len(list(root.iterdir())) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", MARKER])
@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, name: str, damage: str):
    save(tmp_path, checkpoint(1))
    path = save(tmp_path, checkpoint(2)) / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    assert found(tmp_path) == 1


@pytest.mark.parametrize("marker", [b"[]", b"3", b"{}", b'{"state.json": 1}', b'{"state.json": {"size": "x"}}'])
def test_a_marker_that_is_json_and_nothing_else_is_damage_too(tmp_path: Path, marker: bytes):
    save(tmp_path, checkpoint(1))
    (save(tmp_path, checkpoint(2)) / MARKER).write_bytes(marker)
    assert found(tmp_path) == 1


def test_a_step_may_be_damaged_again_after_it_was_set_aside(tmp_path: Path):
    """It came back from the object store, and was no better."""
    root = tmp_path / "a job of its own" / "checkpoints"
    save(root, checkpoint(1))
    for _ in range(2):
        torn = save(tmp_path / "elsewhere", checkpoint(2))
        (torn / "state.json").write_bytes(b"{}")
        shutil.copytree(torn, root / torn.name)
        assert found(root) == 1
        assert steps_on_disk(root) == [1]


def test_all_damaged_is_an_error(tmp_path: Path):
    for step in (1, 2):
        (save(tmp_path, checkpoint(step)) / "model.safetensors").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(LearnerError, match="all 2 checkpoints"):
            expected(tmp_path, job_id="j", last_step=0, published_version=None)


def test_damaged_ones_take_no_place_of_those_that_come_after(tmp_path: Path):
    save(tmp_path, checkpoint(4), keep=1)
    (save(tmp_path, checkpoint(8), keep=2) / "model.safetensors").write_bytes(b"")
    assert found(tmp_path) == 4
    save(tmp_path, checkpoint(5), keep=1)
    assert steps_on_disk(tmp_path) == [5]
    assert found(tmp_path) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["000000005"], "what was set aside goes then"


def test_one_that_is_written_stays_whatever_is_newer(tmp_path: Path):
    save(tmp_path, checkpoint(8))
    save(tmp_path, checkpoint(5), keep=1)
    assert steps_on_disk(tmp_path) == [8, 5]


def step_report(step: int) -> StepReport:
    return StepReport(step=step, t_train=1.0, t_idle=0.0, reward=0.5, trained=["a"], lags={0: 8})


def test_one_of_a_course_that_was_left_is_passed_over(tmp_path: Path):
    """Another machine's learner went back to 3 meanwhile and got to 5: steps up to 7 are not on record any more."""
    save(tmp_path, checkpoint(5, steps=[step_report(5)]))
    save(tmp_path, checkpoint(8, steps=[step_report(8)]))
    read = expected(tmp_path, job_id="j", last_step=5, published_version=2)
    assert read is not None
    assert read.progress.step == 5
    assert steps_on_disk(tmp_path) == [5]


def test_one_whose_last_reports_were_not_acknowledged_is_of_this_course(tmp_path: Path):
    save(tmp_path, checkpoint(8, steps=[step_report(7), step_report(8)]))
    read = expected(tmp_path, job_id="j", last_step=6, published_version=2)
    assert read is not None
    assert read.progress.step == 8


def test_what_a_newer_program_wrote_is_not_taken_for_damaged(tmp_path: Path):
    save(tmp_path, checkpoint(1))
    folder = save(tmp_path, checkpoint(2))
    state = json.loads((folder / "state.json").read_bytes()) | {"format": 5, "more": 1}
    (folder / "state.json").write_text(json.dumps(state))
    marker = json.loads((folder / MARKER).read_bytes())
    marker["state.json"] = {"size": (folder / "state.json").stat().st_size, "blake3": hash_file(folder / "state.json")}
    (folder / MARKER).write_text(json.dumps(marker))
    with pytest.raises(LearnerError, match=r"step 2 has format 5, and this learner reads formats up to 4"):
        latest(tmp_path, job_id="j")
    assert steps_on_disk(tmp_path) == [2, 1]


def test_none_where_one_is_expected_is_an_error(tmp_path: Path):
    root = tmp_path / "none"
    assert expected(root, job_id="j", last_step=0, published_version=None) is None
    assert expected(root, job_id="j", last_step=0, published_version=0) is None
    for last_step, published in [(1, None), (0, 2), (4, 4)]:
        with pytest.raises(LearnerError, match="holds no checkpoint"):
            expected(root, job_id="j", last_step=last_step, published_version=published)


def test_another_jobs_checkpoint_is_refused(tmp_path: Path):
    save(tmp_path, checkpoint(1, job_id="other"))
    with pytest.raises(LearnerError, match="of job other"):
        latest(tmp_path, job_id="j")


def test_training_goes_on_bit_by_bit_from_disk(tmp_path: Path):
    whole = GRPOTrainer(random_model(), job())
    losses = []
    for i in range(6):
        losses.append(whole.step(batch(i)).values["loss"])
        if i == 2:
            state = whole.state()
            progress = Progress(job_id="j", step=state.steps)
            save(tmp_path, Checkpoint(progress, state.weights, state.optimizer, torch.random.get_rng_state()))
    read = latest(tmp_path, job_id="j")
    assert read is not None
    resumed = GRPOTrainer(random_model(seed=9), job())
    resumed.restore(TrainerState(read.progress.step, dict(read.weights), dict(read.optimizer)))
    assert [resumed.step(batch(i)).values["loss"] for i in range(3, 6)] == losses[3:]


GAC = {"gac": True, "gac_low": 0.05, "gac_high": 0.5, "learning_rate": 1e-4}
ADAPTIVE = {"staleness": {"max": 6, "adaptive": True}}


@pytest.mark.parametrize("spec", [{"learner": GAC}, ADAPTIVE])
@pytest.mark.parametrize("kill", [1, 2, 3])
def test_a_run_that_goes_by_the_previous_gradient_goes_on_bit_by_bit(tmp_path: Path, spec: dict, kill: int):
    groups = [batch(0), batch(0), batch(0), batch(1), batch(0)]
    whole, values = GRPOTrainer(random_model(), job(**spec)), []
    for i, made in enumerate(groups):
        values.append(whole.step(made).values)
        if i + 1 == kill:
            state = whole.snapshot()
            progress = Progress(job_id="j", step=state.steps, skipped=state.skipped)
            whole_copy = Checkpoint(progress, state.weights, state.optimizer, torch.random.get_rng_state())
    if "learner" in spec:
        assert [v.get("gac_skipped") for v in values][:3] == [None, 1.0, 0.0]
        assert values[2]["gac_removed"] > 0
    save(tmp_path, whole_copy)
    read = latest(tmp_path, job_id="j")
    assert read is not None
    resumed = GRPOTrainer(random_model(seed=9), job(**spec))
    resumed.restore(TrainerState(read.progress.step, dict(read.weights), dict(read.optimizer), read.progress.skipped))
    assert [resumed.step(made).values for made in groups[kill:]] == values[kill:]
    assert all(torch.equal(t, whole.weights()[name]) for name, t in resumed.weights().items())


def test_a_gradient_that_is_only_told_is_not_in_the_checkpoint():
    trainer = GRPOTrainer(random_model(), job(learner={"grad_cosine": True}))
    trainer.step(batch(0))
    assert {key.partition("/")[0] for key in trainer.state().optimizer} == {"exp_avg", "exp_avg_sq", "step"}


def test_a_full_disk_is_a_learner_error(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(LearnerError, match="step 1 can't be written"):
        save(blocked, checkpoint(1))


def test_a_disk_that_fills_up_in_the_middle_is_a_learner_error_and_the_one_before_counts(tmp_path: Path):
    save(tmp_path, checkpoint(1))
    large = Checkpoint(Progress(job_id="j", step=2), {"w": torch.zeros(100_000)}, {}, torch.random.get_rng_state())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(LearnerError, match=r"step 2 can't be written: .*too large"):
            save(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found(tmp_path) == 1


def test_a_stored_checkpoint_of_format_1_still_loads():
    """Bytes as they are on users' disks."""
    read = latest(Path(__file__).parent / "checkpoint_v1", job_id="j")
    assert read is not None
    assert torch.equal(read.weights["w"], torch.full((3,), 7.0))
    assert read.optimizer.keys() == {"exp_avg/w", "step/w"}
    assert (read.progress.step, read.progress.evaluated, read.progress.active_s) == (7, 5, 12.5)
    assert [r.trained for r in read.progress.steps] == [["a", "b"]]
    assert [(d.work_item, d.lag) for d in read.progress.steps[0].dropped] == [("c", None)]
    assert read.progress.best_step is None
    assert (read.progress.undecided, read.progress.adaptive) == ((), None)
    with torch.random.fork_rng():
        torch.random.set_rng_state(read.rng)


def test_the_best_stays_beside_the_newest(tmp_path: Path):
    save(tmp_path, checkpoint(2, best_step=2, best_reward=0.5))
    for step in (4, 6, 8):
        save(tmp_path, checkpoint(step, best_step=2, best_reward=0.5), keep=1)
    assert steps_on_disk(tmp_path) == [8, 2]
    save(tmp_path, checkpoint(10, best_step=10, best_reward=0.75), keep=1)
    assert steps_on_disk(tmp_path) == [10]
    assert torch.equal(weights_of(tmp_path, 10)["w"], torch.full((3,), 10.0))
    with pytest.raises(LearnerError, match="damaged"):
        weights_of(tmp_path, 2)


def test_the_only_candidate_of_format_2_still_counts():
    old = Progress.model_validate_json('{"format": 2, "job_id": "j", "step": 4, "candidate_step": 2}')
    assert (old.undecided, old.adaptive) == ((2,), None)


def test_the_state_of_adaptive_staleness_comes_back_whatever_rewards_it_saw(tmp_path: Path):
    save(tmp_path, checkpoint(3, adaptive=State(4, 7, (0.5, math.nan, -math.inf))))
    read = latest(tmp_path, job_id="j")
    assert read is not None
    assert read.progress.adaptive is not None
    state = read.progress.adaptive
    assert (state.staleness, state.calm, str(state.rewards)) == (4, 7, "(0.5, nan, -inf)")


def test_candidates_stay_until_they_are_decided(tmp_path: Path):
    for step, undecided in [(2, (2,)), (4, (2, 4)), (6, (2, 4)), (8, (2, 4, 8))]:
        save(tmp_path, checkpoint(step, candidates=undecided), keep=1)
    assert steps_on_disk(tmp_path) == [8, 4, 2]
    save(tmp_path, checkpoint(10, candidates=(8,), best_step=2, best_reward=0.5), keep=1)
    assert steps_on_disk(tmp_path) == [10, 8, 2]
