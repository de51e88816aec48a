"""Going on where another process stopped.

Invariant: after `resume` weights, optimizer, step and random state are those of the newest whole checkpoint, and the
control service has acknowledged every report that was under way when it was written; so its index hands out exactly
what is still to be trained on.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import expected, steps_on_disk
from app.learner.keeper import Restorable, fetch_newer
from app.learner.outbox import Outbox
from app.learner.position import Position
from app.learner.trainer import TrainerState
from app.protocol.errors import Unavailable
from app.protocol.learner import StartAnswer
from app.storage.objects import ObjectStore

log = logging.getLogger(__name__)
FLUSH_S = 660.0
"""Longer than the client's patience, so that its error comes first."""


def fetch_checkpoint(objects: ObjectStore, prefix: str, root: Path) -> None:
    """From the object store, if this machine has none or only older ones: it may not be the one of before.

    Raises Unavailable if there is none here and the store does not answer, LearnerError when the disk refuses.
    """
    try:
        fetch_newer(objects, prefix, root)
    except Unavailable as error:
        if not steps_on_disk(root):
            raise
        log.warning("whether the object store has a newer checkpoint is not known: %s", error.detail)


def resume(answer: StartAnswer, root: Path, trainer: Restorable, buffer: ReplayBuffer, outbox: Outbox) -> Position:
    """Go on from the newest checkpoint, and hand in the reports that were under way when it was written.

    Raises LearnerError if there is none where one is expected.
    """
    found = expected(
        root,
        job_id=answer.job_id,
        last_step=answer.last_step,
        published_version=answer.published_version,
    )
    if found is None:
        return Position()
    progress = found.progress
    trainer.restore(TrainerState(progress.step, dict(found.weights), dict(found.optimizer)))
    torch.random.set_rng_state(found.rng)
    log.info("resuming from step %d", progress.step)
    for report in progress.steps:
        buffer.note([*report.trained, *(d.work_item for d in report.dropped)])
        outbox.put(report)
    for evaluation in progress.evals:
        outbox.put(evaluation)
    # Only then does the index leave out what these steps consumed.
    outbox.flush(FLUSH_S)
    best = None
    if progress.best_step is not None and progress.best_reward is not None:
        best = (progress.best_step, progress.best_reward)
    return Position(
        evaluated=progress.evaluated,
        active_s=progress.active_s,
        last_publish=progress.step,
        best=best,
        candidates=progress.undecided,
        adaptive=progress.adaptive,
    )
