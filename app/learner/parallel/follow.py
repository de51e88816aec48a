"""What ranks other than 0 do: what rank 0 announces, until it says that this is the end.

Invariant: they decide nothing and know nothing of the task. An error that all ranks have in common (a loss that is not
finite, a model that can't be loaded) is rank 0's to report, and they wait for the end that it announces then; any other
ends this process, and with it, through torchrun and the broken connections, all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from app.learner.config import LearnerSettings
from app.learner.evaluate import Sampler
from app.learner.model import resolve
from app.learner.packing import check_job
from app.learner.parallel.messages import Loading, Progress, Rehearsal, Sampling, unpacked
from app.learner.parallel.ranks import Command, Group
from app.learner.prepare import agree, load_for
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput, EchoError, LearnerError, Unavailable

log = logging.getLogger(__name__)
Sample = Callable[[list[list[int]], int], object]
"""Takes prompts, and how many tokens each answer may have."""


def follow(ranks: Group, settings: LearnerSettings) -> int:
    """The exit code: 0 when rank 0 said that it is over, 1 when it is gone or this rank can't go on."""
    try:
        command = ranks.listen()
        if command.op == "load":
            trainer, sampler = _load(ranks, settings, Loading.model_validate_json(command.payload))
            serve(ranks, trainer, sampler)
    except (BadInput, LearnerError) as error:
        log.error("rank %d can't go on: %s", ranks.rank, error.detail)
        _wait_for_end(ranks)
        return 1
    except EchoError as error:
        log.error("rank %d ends: %s", ranks.rank, error.detail)
        return 1
    return 0


def serve(ranks: Group, trainer: GRPOTrainer, sample: Sample) -> None:
    """Obey until the end. Raises Unavailable when rank 0 is gone."""
    while (command := ranks.listen()).op != "end":
        try:
            _obey(command, trainer, sample)
        except LearnerError as error:
            log.warning("rank %d: %s", ranks.rank, error.detail)


def _wait_for_end(ranks: Group) -> None:
    """Not before rank 0 has said why: torchrun ends all when the first process does."""
    try:
        while ranks.listen().op != "end":
            pass
    except Unavailable as error:
        log.info("%s", error.detail)


def _obey(command: Command, trainer: GRPOTrainer, sample: Sample) -> None:
    match command.op:
        case "step":
            trainer.step(unpacked(command.payload))
        case "rehearse":
            step = Rehearsal.model_validate_json(command.payload)
            trainer.rehearse(step.rollouts, step.prompts, step.completion_tokens)
        case "state":
            trainer.state()
        case "weights":
            trainer.weights()
        case "restore":
            trainer.receive(Progress.model_validate_json(command.payload))
        case "sample":
            asked = Sampling.model_validate_json(command.payload)
            sample(asked.prompts, asked.max_tokens)
        case _:
            raise LearnerError(f"rank 0 announced {command.op}, which has no place here")


def _load(ranks: Group, settings: LearnerSettings, told: Loading) -> tuple[GRPOTrainer, Sampler]:
    """The model as rank 0 has it. All ranks learn whether one of them failed."""
    spec = told.spec
    failure: EchoError | None = None
    try:
        loaded = load_for(resolve(spec.model, settings.cache, revision=told.revision), spec, ranks)
    except EchoError as error:
        failure = error
        log.error("rank %d: %s", ranks.rank, error.detail)
    agree(ranks, failure)
    trainer = GRPOTrainer(loaded.model, spec, ranks=ranks)
    check_job(loaded.model, spec.learner)
    return trainer, Sampler(loaded.model, loaded.tokenizer, spec.sampling, ranks)
