"""metrics.jsonl tells each step once, also after a learner went back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app.learner.journal import Journal, open_board
from app.learner.metrics import advantage_metrics, node_metrics
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput
from app.protocol.learner import DroppedGroup, EvalReport, StepReport
from tests.unit.learner.samples import batch, job, random_model


def report(step: int, loss: float = 0.5) -> StepReport:
    return StepReport(
        step=step, t_train=2.0, t_idle=0.5, reward=0.25, trained=["a", "b"], lags={0: 4, 2: 4}, metrics={"loss": loss}
    )


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_everything_that_a_plot_needs(tmp_path: Path):
    journal = Journal(tmp_path, resume_step=0)
    journal.step(report(1))
    journal.evaluation(EvalReport(step=1, reward=0.75, prompts=9))
    step, evaluation = rows(tmp_path)
    assert step == {
        "kind": "step", "step": 1, "groups": 2, "dropped": 0, "lags": {"0": 4, "2": 4}, "reward": 0.25,
        "t_train": 2.0, "t_idle": 0.5, "loss": 0.5,
    }  # fmt: skip
    assert evaluation == {"kind": "evaluation", "step": 1, "reward": 0.75, "prompts": 9}


def test_what_was_dropped_counts_whenever_it_was_told(tmp_path: Path):
    gone = [DroppedGroup(work_item=name, reason="invalid") for name in "cde"]
    Journal(tmp_path, resume_step=0).step(report(1).model_copy(update={"told": gone[:2], "dropped": gone[2:]}))
    assert rows(tmp_path)[0]["dropped"] == 3


def test_going_back_takes_out_what_came_after(tmp_path: Path):
    journal = Journal(tmp_path, resume_step=0)
    for step in range(1, 6):
        journal.step(report(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    again = Journal(tmp_path, resume_step=3)
    again.step(report(4, loss=0.75))
    assert [(r["step"], r["loss"]) for r in rows(tmp_path)] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.75)]


def test_an_evaluation_that_is_made_again_is_there_once(tmp_path: Path):
    """It was not in the checkpoint yet, or it is the last one again."""
    made = EvalReport(step=3, reward=0.75, prompts=9)
    for _ in range(2):
        journal = Journal(tmp_path, resume_step=3)
        journal.evaluation(made)
        journal.evaluation(made.model_copy(update={"final": True}))
    assert [r["step"] for r in rows(tmp_path)] == [3]
    journal.step(report(4))
    again = Journal(tmp_path, resume_step=2)
    again.evaluation(made)
    assert [r["step"] for r in rows(tmp_path)] == [3], "what came after the checkpoint is gone, and told anew"


def test_a_result_that_is_told_again_is_there_once_also_after_a_restart(tmp_path: Path):
    for _ in range(2):
        journal = Journal(tmp_path, resume_step=3)
        for _ in range(2):
            journal.heard(2, 0.5)
    journal.evaluation(EvalReport(step=3, reward=0.75, prompts=9))
    journal.heard(3, 0.75)
    journal.heard(3, 0.5)
    assert [(r["step"], r["reward"], r.get("prompts")) for r in rows(tmp_path)] == [
        (2, 0.5, None), (3, 0.75, 9), (3, 0.5, None),
    ]  # fmt: skip


def test_what_a_crash_left_in_the_file_costs_no_more_than_its_line(tmp_path: Path):
    journal = Journal(tmp_path, resume_step=0)
    journal.step(report(1))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\x00\xc3(\n{"kind": "evaluation", "step": 1}\n')
    Journal(tmp_path, resume_step=1).step(report(2))
    assert [(r["kind"], r["step"]) for r in rows(tmp_path)] == [("step", 1), ("evaluation", 1), ("step", 2)]


def test_a_disk_that_refuses_does_not_stop_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    journal = Journal(tmp_path / "gone", resume_step=0)
    journal.step(report(1))
    journal.step(report(2))
    assert caplog.text.count("left alone from here on") == 1


class Board:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.seen.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_the_same_numbers_go_to_tensorboard(tmp_path: Path):
    board = Board()
    journal = Journal(tmp_path, resume_step=0, board=board)
    journal.step(report(3))
    journal.evaluation(EvalReport(step=3, reward=0.75, prompts=9))
    journal.close()
    assert {("train/loss", 0.5, 3), ("train/lag/2", 4.0, 3), ("eval/reward", 0.75, 3)} <= set(board.seen)
    assert board.closed


def test_tensorboard_without_its_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match=r"echo2\[tensorboard\]"):
        open_board(tmp_path, purge_step=1)


def test_the_mismatch_of_each_node_is_that_of_its_own_tokens():
    import dataclasses

    groups = [dataclasses.replace(g, node=f"n{i % 2}") for i, g in enumerate(batch(0, 6))]
    values = GRPOTrainer(random_model(), job(learner={"micro_batch_tokens": 40})).step(groups).values
    for node in ("n0", "n1"):
        own = [g for g in groups if g.node == node]
        alone = GRPOTrainer(random_model(), job()).step(own).values["mismatch_kl"]
        assert values[f"mismatch_kl_node_{node}"] == pytest.approx(alone, rel=1e-4)


def test_unknown_nodes_and_no_tokens_have_no_number():
    import torch

    assert node_metrics(torch.zeros(0), []) == {}
    assert node_metrics(torch.zeros(3), [("", 2), ("n", 1)]) == {"mismatch_kl_node_n": 0.0}
    many = node_metrics(torch.arange(40.0) / 40, [(f"n{i:02}", 1) for i in range(40)])
    assert len(many) == 32
    assert "mismatch_kl_node_n39" in many
    assert "mismatch_kl_node_n00" not in many


def test_advantages_that_do_not_spread_say_so():
    assert advantage_metrics([[0.0, 0.0], [0.0]]) == {"advantage_std": 0.0, "advantage_max": 0.0}
    assert advantage_metrics([[1.0, -1.0], [2.0, -2.0]]) == {
        "advantage_std": pytest.approx(2.5**0.5),
        "advantage_max": 2.0,
    }


@pytest.mark.parametrize("call", ["add_scalar", "flush", "close"])
def test_a_board_that_fails_costs_nothing_but_the_board(tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str):
    """W&B's run is written by a process of its own, which may be killed."""
    board = Board()

    def gone(*args: object) -> None:
        raise BrokenPipeError("its helper is gone")

    setattr(board, call, gone)
    journal = Journal(tmp_path, resume_step=0, board=board)
    for step in (1, 2):
        journal.step(report(step))
    journal.close()
    assert [r["step"] for r in rows(tmp_path)] == [1, 2]
    assert caplog.text.count("its helper is gone") == 1
