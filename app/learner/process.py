"""A learner process from start to its last word.

Invariant: one process at a time works in a job's folder; whatever goes wrong that the control service can be told, it
is told, as the job's reason. An unknown model or task fails before `ready`, so before anything is rented.
What fails before there is a session (the lock, an object store that isn't on this machine) is this process's failure
and not the job's: started in the right place, the learner goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

import torch

from app.learner.client import ControlClient, Fenced
from app.learner.config import LearnerSettings, load_settings
from app.learner.files import exclusive
from app.learner.parallel.follow import follow
from app.learner.parallel.launch import launch, leave
from app.learner.parallel.ranks import ALONE, Group, Ranks
from app.learner.session import Session
from app.protocol.errors import BadInput, EchoError, Unavailable
from app.protocol.learner import Done, StartRequest

log = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 60.0


def run(settings: LearnerSettings, ranks: Ranks = ALONE) -> int:
    """Rank 0's work. The exit code: 0 when the job ended as wanted; 1 when it failed, another learner took over, or
    control service or object store stayed away. In the last case the job has not failed: started again, the learner
    goes on.
    """
    torch.set_num_threads(settings.learner_threads)
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    control = ControlClient(settings.control_url, settings.job_id, settings.learner_token.get_secret_value())
    try:
        # First the epoch, which ends a predecessor that still lives, then its folder.
        answer = control.start(StartRequest(pid=os.getpid(), host=socket.gethostname()))
        with exclusive(settings.work_dir / ".lock", timeout_s=_LOCK_TIMEOUT_S):
            session = Session(settings, control, answer, ranks)
            try:
                session.run()
            except (Fenced, Unavailable):
                # Somebody else goes on, or a later process can: neither is the job's failure.
                raise
            except (EchoError, OSError, torch.OutOfMemoryError) as error:
                reason = failure(error)
                log.error("%s", reason)
                control.done(Done(status="failed", reason=reason, step=session.step))
                return 1
            finally:
                session.close()
    except EchoError as error:
        log.error("learner ends: %s", error.detail)
        return 1
    finally:
        control.close()
        dismiss(ranks)
    return 0


def failure(error: Exception) -> str:
    """A reason that a user can act on, at most 2000 characters."""
    if isinstance(error, EchoError):
        return error.detail[:2000]
    if isinstance(error, torch.OutOfMemoryError):
        return "the learner's device is out of memory; lower learner.micro_batch_tokens"
    return f"the learner's disk: {error}"[:2000]


def dismiss(ranks: Ranks) -> None:
    """Tell the other ranks, if they can be reached, that this is the end."""
    try:
        ranks.announce("end")
    except Unavailable as error:
        log.info("%s", error.detail)


def main(job_id: str | None = None, **given: str | None) -> int:
    """Entry of `python -m app.learner` and `echo2 learner`; the exit code. `given`: settings, None ones left out."""
    from transformers.utils.logging import disable_progress_bar

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    disable_progress_bar()
    try:
        settings = load_settings(job_id, **given)
        ranks = launch(settings.learner_collective_timeout_s)
    except BadInput as error:
        log.error("%s", error.detail)
        return 2
    except Unavailable as error:
        log.error("%s", error.detail)
        return 1
    code = follow(ranks, settings) if isinstance(ranks, Group) and ranks.rank != 0 else run(settings, ranks)
    leave(ranks, in_order=code == 0)
    return code
