"""Where a step's numbers go beside metrics.jsonl: run files of Weights & Biases, and several such places at once.

Invariant: nothing is sent anywhere from here; W&B runs are offline, and `wandb sync` uploads them when somebody wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from app.learner.journal import ScalarWriter, open_board
from app.protocol.errors import BadInput
from app.protocol.job import JobSpec


class Boards:
    """Several writers as one."""

    def __init__(self, writers: Sequence[ScalarWriter]) -> None:
        self._writers = writers

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One number, to each of them."""
        for writer in self._writers:
            writer.add_scalar(tag, scalar_value, global_step)

    def flush(self) -> None:
        """Write out what is held back."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Write out and end."""
        for writer in self._writers:
            writer.close()


class RunWriter:
    """A run of W&B: `run` has `define_metric`, `log` and `finish`.

    All numbers are over our own `step`: W&B's counter can't go back, as a learner does that goes on from a checkpoint.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._row: dict[str, float] = {}
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One number; those of one step are written together."""
        if self._row.get("step") != global_step:
            self.flush()
        self._row |= {"step": global_step, tag: scalar_value}

    def flush(self) -> None:
        """Write out what is held back."""
        if self._row:
            self._run.log(self._row)
        self._row = {}

    def close(self) -> None:
        """Write out and end the run."""
        self.flush()
        self._run.finish()


def open_boards(folder: Path, spec: JobSpec, *, job_id: str, step: int) -> Boards:
    """What the job asks for, for a learner that stands at `step`. Raises BadInput if a package is missing."""
    boards = list[ScalarWriter]()
    if spec.learner.tensorboard:
        boards.append(open_board(folder / "tensorboard", purge_step=step + 1))
    if spec.learner.wandb:
        boards.append(open_run(folder / "wandb", job_id=job_id, name=spec.name))
    return Boards(boards)


def open_run(folder: Path, *, job_id: str, name: str, package: Any = None) -> RunWriter:
    """An offline run in `folder`, which a learner that starts again goes on with. `package`: wandb, which is imported
    if it is not given. Raises BadInput if it is missing."""
    if package is None:
        try:
            package = import_module("wandb")
        except ImportError as error:
            raise BadInput("learner.wandb is true but the learner has no package wandb: pip install wandb") from error
    folder.mkdir(parents=True, exist_ok=True)
    run = package.init(project="echo2", id=job_id, name=name or job_id, dir=str(folder), mode="offline", resume="allow")
    return RunWriter(run)
