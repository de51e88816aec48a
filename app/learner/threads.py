"""Threads that the learner can't do without.

Invariant: none of them ends by an error without the training loop being told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from app.protocol.errors import EchoError, Unavailable


def watched(name: str, run: Callable[[], None], fail: Callable[[EchoError], None]) -> threading.Thread:
    """A thread that is not started yet. If `run` raises what it should have dealt with, the error is in the log, and
    `fail` is given an Unavailable: the job is not to blame, and a new process may do it."""

    def go() -> None:
        done = False
        try:
            run()
            done = True
        finally:
            if not done:
                fail(Unavailable(f"the thread {name} of the learner has ended; its error is in the learner's log"))

    return threading.Thread(target=go, name=name, daemon=True)
