"""What ranks other than 0 do: what rank 0 announces, until it says that this is the end.

Invariant: they decide nothing. An error that all ranks have in common (a loss that is not finite) is rank 0's to
report; any other ends this process, and with it, through torchrun and the broken connections, all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from app.learner.config import LearnerSettings
from app.learner.evaluate import Evaluator
from app.learner.model import resolve
from app.learner.parallel.messages import Progress, Rehearsal, unpacked
from app.learner.parallel.ranks import Command, Group
from app.learner.prepare import agree, assemble, load_for
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import EchoError, LearnerError
from app.protocol.job import JobSpec
from app.tasks.files import fetch_files
from app.tasks.registry import load_task

log = logging.getLogger(__name__)


def follow(ranks: Group, settings: LearnerSettings) -> int:
    """The exit code: 0 when rank 0 said that it is over, 1 when it is gone or this rank can't go on."""
    try:
        command = ranks.listen()
        if command.op == "load":
            trainer, evaluator = _load(ranks, settings, JobSpec.model_validate_json(command.payload))
            serve(ranks, trainer, evaluator.run)
    except EchoError as error:
        log.error("rank %d ends: %s", ranks.rank, error.detail)
        return 1
    return 0


def serve(ranks: Group, trainer: GRPOTrainer, evaluate: Callable[[], object]) -> None:
    """Obey until the end. Raises Unavailable when rank 0 is gone."""
    while (command := ranks.listen()).op != "end":
        try:
            _obey(command, trainer, evaluate)
        except LearnerError as error:
            log.warning("rank %d: %s", ranks.rank, error.detail)


def _obey(command: Command, trainer: GRPOTrainer, evaluate: Callable[[], object]) -> None:
    match command.op:
        case "step":
            trainer.step(unpacked(command.payload))
        case "rehearse":
            asked = Rehearsal.model_validate_json(command.payload)
            trainer.rehearse(asked.rollouts, asked.prompts, asked.completion_tokens)
        case "state":
            trainer.state()
        case "restore":
            trainer.receive(Progress.model_validate_json(command.payload))
        case "evaluate":
            evaluate()
        case _:
            raise LearnerError(f"rank 0 announced {command.op}, which has no place here")


def _files(settings: LearnerSettings, spec: JobSpec) -> Path | None:
    """The task's files, where rank 0 has put them. Raises LearnerError if they are not on this machine."""
    if not spec.task.files:
        return None

    def absent(key: str) -> bytes:
        raise LearnerError(f"{key} is not in {settings.work_dir / 'task'}, where rank 0 has put it: is it its folder?")

    return fetch_files(absent, settings.job_id, spec.task, settings.work_dir / "task")


def _load(ranks: Group, settings: LearnerSettings, spec: JobSpec) -> tuple[GRPOTrainer, Evaluator]:
    """Model and task as rank 0 has them. All ranks learn whether one of them failed."""
    failure: EchoError | None = None
    try:
        task = load_task(spec.task, spec.seed, _files(settings, spec))
        loaded = load_for(resolve(spec.model, settings.cache), spec, ranks)
    except EchoError as error:
        failure = error
        log.error("rank %d: %s", ranks.rank, error.detail)
    agree(ranks, failure)
    return assemble(loaded, task, spec, ranks)
