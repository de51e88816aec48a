"""Going on where another process stopped.

Invariant: after `resume` weights, optimizer, step and random state are those of the newest whole checkpoint, and the
control service has acknowledged every report that was under way when it was written; so its index hands out exactly
what is still to be trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import Checkpoint, expected, latest, steps_on_disk
from app.learner.keeper import Restorable, fetch_newer
from app.learner.outbox import FLUSH_S, Outbox
from app.learner.position import Position
from app.learner.trainer import TrainerState
from app.protocol.errors import Unavailable
from app.protocol.learner import StartAnswer
from app.storage.objects import ObjectStore

log = logging.getLogger(__name__)


def fetch_checkpoint(objects: ObjectStore, prefix: str, root: Path, last_step: int | None = None) -> None:
    """From the object store, if this machine has none or only older ones: it may not be the one of before.

    Raises Unavailable if there is none here and the store does not answer, LearnerError when the disk refuses.
    """
    try:
        fetch_newer(objects, prefix, root, last_step=last_step)
    except Unavailable as error:
        if not steps_on_disk(root):
            raise
        log.warning("whether the object store has a newer checkpoint is not known: %s", error.detail)


def resume(
    answer: StartAnswer,
    root: Path,
    trainer: Restorable,
    buffer: ReplayBuffer,
    outbox: Outbox,
    fetch: Callable[[], None] = lambda: None,
) -> Position:
    """Go on from the newest checkpoint, and hand in the reports that were under way when it was written.

    `fetch` brings a newer one from elsewhere, if there is one. Raises LearnerError if there is none where one is
    expected.
    """
    found = _newest(answer, root, fetch)
    if found is None:
        return Position()
    progress, spec = found.progress, answer.spec
    trainer.restore(TrainerState(progress.step, dict(found.weights), dict(found.optimizer), progress.skipped))
    if progress.format < 4 and progress.step > 0 and (spec.learner.gac or spec.adaptive):
        log.warning(
            "the checkpoint of step %d has format %d, without the previous gradient: the first step is taken as it is, "
            "and what follows is not bit by bit what an uninterrupted run would make", progress.step, progress.format,
        )  # fmt: skip
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


def _newest(answer: StartAnswer, root: Path, fetch: Callable[[], None]) -> Checkpoint | None:
    fetch()
    before = steps_on_disk(root)
    found = latest(root, job_id=answer.job_id, last_step=answer.last_step)
    if steps_on_disk(root) != before:
        # What does not count here may be whole elsewhere.
        fetch()
        found = None
    if found is not None:
        return found
    return expected(
        root,
        job_id=answer.job_id,
        last_step=answer.last_step,
        published_version=answer.published_version,
    )
