"""What a job's steps told, one JSON object a line, for people and their tools.

Invariant: `metrics.jsonl` holds each step and evaluation of the present course once: what was written after the
checkpoint that a learner goes on from is taken out before it goes on. Losing the file, or a board, costs nothing but
that.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from app.learner.buffer import Group
from app.protocol.errors import BadInput
from app.protocol.learner import DroppedGroup, EvalReport, StepReport

log = logging.getLogger(__name__)
NAME = "metrics.jsonl"


class ScalarWriter(Protocol):
    """The part of torch's SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Journal:
    """Appends to `folder`/metrics.jsonl and, if there is a writer, to TensorBoard files."""

    def __init__(self, folder: Path, *, resume_step: int, board: ScalarWriter | None = None) -> None:
        self.path = folder / NAME
        self._board = board
        self._broken = False
        self._evaluated: set[tuple[int, float | None]] = set()
        """Steps and held-out rewards that are in the file."""
        try:
            self._evaluated = _cut(self.path, resume_step)
        except OSError as error:
            self._give_up(error)

    def step(self, report: StepReport) -> None:
        """One learner step; what it trained on and dropped is in the control service, so it is only counted here."""
        numbers = {"reward": report.reward, "t_train": report.t_train, "t_idle": report.t_idle} | report.metrics
        dropped = len(report.dropped) + len(report.told)
        row = {"kind": "step", "step": report.step, "groups": len(report.trained), "dropped": dropped}
        self._append(row | {"lags": report.lags} | numbers)
        self._scalars("train", report.step, numbers | {f"lag/{k}": float(n) for k, n in report.lags.items()})

    def evaluation(self, report: EvalReport) -> None:
        """A held-out reward. That of the same step again, by a process that died before it was in a checkpoint or at
        the end, is the same."""
        self._held_out(report.step, report.reward, {"prompts": report.prompts})

    def heard(self, step: int, reward: float) -> None:
        """A held-out reward as the control service tells it, whoever measured it; it tells each several times."""
        self._held_out(step, reward, {})

    def close(self) -> None:
        """Write out what is held back."""
        self._on_board(lambda board: board.close())

    def _held_out(self, step: int, reward: float, more: dict[str, Any]) -> None:
        if (step, reward) in self._evaluated:
            return
        self._evaluated.add((step, reward))
        self._append({"kind": "evaluation", "step": step, "reward": reward} | more)
        self._scalars("eval", step, {"reward": reward})

    def _append(self, row: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self._give_up(error)

    def _scalars(self, group: str, step: int, numbers: dict[str, float]) -> None:
        def write(board: ScalarWriter) -> None:
            for name, value in numbers.items():
                board.add_scalar(f"{group}/{name}", value, step)
            board.flush()

        self._on_board(write)

    def _on_board(self, write: Callable[[ScalarWriter], None]) -> None:
        try:
            if self._board is not None:
                write(self._board)
        except OSError as error:
            # A full disk, or W&B's helper process is gone.
            self._board = None
            log.warning("TensorBoard's or W&B's files can't be written and are left alone from here on: %s", error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        log.warning("%s can't be written and is left alone from here on: %s", self.path, error)


def _cut(path: Path, resume_step: int) -> set[tuple[int, float | None]]:
    """Take out what comes after a step, and what a crash left of a line; steps and rewards of evaluations that stay."""
    if not path.exists():
        return set()
    kept: list[str] = []
    evaluated: set[tuple[int, float | None]] = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= resume_step:
            kept.append(line + "\n")
            if row.get("kind") == "evaluation":
                evaluated.add((row["step"], row.get("reward")))
    part = path.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)
    return evaluated


def open_board(folder: Path, *, purge_step: int) -> ScalarWriter:
    """TensorBoard files in `folder`; steps from `purge_step` on that are in it already don't count. Raises BadInput if
    the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInput(
            "learner.tensorboard is true but the learner has no package tensorboard: pip install 'echo2[tensorboard]'"
        ) from error
    writer: ScalarWriter = SummaryWriter(str(folder), purge_step=purge_step)
    return writer


def supply_metrics(groups: Sequence[Group], prompts: int, dropped: Sequence[DroppedGroup]) -> dict[str, float]:
    """How full the batch is, and what was dropped since the last one: groups by reason, and stale ones by age."""
    reasons = Counter(f"dropped_{d.reason}" for d in dropped)
    ages = Counter(f"dropped_lag_{d.lag}" for d in dropped if d.lag is not None)
    missing = {"missing_groups": float(max(0, prompts - len(groups)))}
    return missing | {name: float(n) for name, n in sorted((reasons + ages).items())}
