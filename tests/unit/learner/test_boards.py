"""What TensorBoard and W&B read of a run: with TensorBoard's own reader, and a stand-in for the package wandb."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.learner.boards import Boards, open_run
from app.learner.journal import Journal, open_board
from app.protocol.errors import BadInput
from app.protocol.learner import EvalReport, StepReport


def report(step: int, loss: float) -> StepReport:
    return StepReport(
        step=step, t_train=2.0, t_idle=0.5, reward=0.25, trained=["a", "b"], lags={0: 4, 2: 4}, metrics={"loss": loss}
    )


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Each curve as TensorBoard would draw it."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_every_step(tmp_path: Path):
    journal = Journal(tmp_path, resume_step=0, board=open_board(tmp_path / "tensorboard", purge_step=1))
    for step in (1, 2):
        journal.step(report(step, loss=step / 4))
    journal.evaluation(EvalReport(step=2, reward=0.75, prompts=9))
    curves = shown(tmp_path / "tensorboard")
    assert curves["train/loss"] == [(1, 0.25), (2, 0.5)], "what is written is there at once, before the end"
    journal.close()
    assert shown(tmp_path / "tensorboard") == curves
    assert curves["eval/reward"] == [(2, 0.75)]
    assert curves["train/lag/2"] == [(1, 4.0), (2, 4.0)]
    assert {"train/reward", "train/t_train", "train/t_idle", "train/lag/0"} <= curves.keys()


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path):
    for first, last, loss in ((1, 5, 0.25), (4, 6, 0.5)):
        journal = Journal(tmp_path, resume_step=first - 1, board=open_board(tmp_path / "t", purge_step=first))
        for step in range(first, last + 1):
            journal.step(report(step, loss))
        journal.close()
    assert shown(tmp_path / "t")["train/loss"] == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5), (5, 0.5), (6, 0.5)]


class Wandb:
    """As much of the package as is used, and its rule that a run with an id goes on."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.axes: list[tuple[str, str | None]] = []
        self.rows: list[dict[str, float]] = []
        self.finished = False

    def init(self, **given: Any) -> Wandb:
        self.given = given
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


def test_a_run_of_wandb_has_a_row_a_step_over_our_own_steps_and_goes_nowhere(tmp_path: Path):
    package = Wandb()
    journal = Journal(
        tmp_path, resume_step=0, board=open_run(tmp_path / "w", job_id="j", name="spell", package=package)
    )
    journal.step(report(1, loss=0.5))
    journal.evaluation(EvalReport(step=1, reward=0.75, prompts=9))
    journal.step(report(2, loss=0.25))
    assert not package.finished
    journal.close()
    assert package.given["mode"] == "offline"
    assert (package.given["id"], package.given["name"], package.given["resume"]) == ("j", "spell", "allow")
    assert Path(package.given["dir"]).is_dir()
    assert ("*", "step") in package.axes
    assert [row["step"] for row in package.rows] == [1, 1, 2]
    assert [row.get("train/loss") for row in package.rows] == [0.5, None, 0.25]
    assert package.rows[1]["eval/reward"] == 0.75
    assert package.finished


def test_both_are_told_the_same(tmp_path: Path):
    package = Wandb()
    boards = Boards(
        [open_board(tmp_path / "t", purge_step=1), open_run(tmp_path, job_id="j", name="", package=package)]
    )
    journal = Journal(tmp_path, resume_step=0, board=boards)
    journal.step(report(1, loss=0.5))
    journal.close()
    curves = shown(tmp_path / "t")
    assert {name: value for name, [(_, value)] in curves.items()} == {
        name: value for name, value in package.rows[0].items() if name != "step"
    }


def test_wandb_without_its_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadInput, match="pip install wandb"):
        open_run(tmp_path, job_id="j", name="")
