"""What the learner is doing, and the thread that says so.

Invariant: while the process lives the control service hears from it every few seconds, also during a long step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from app.learner.client import Control
from app.learner.outbox import Directives
from app.learner.threads import watched
from app.protocol.errors import EchoError, Unavailable
from app.protocol.learner import LearnerHeartbeat
from app.snapshots.rates import Rate

log = logging.getLogger(__name__)
PERIOD_S = 2.0
State = Literal["loading", "waiting", "training", "evaluating", "finishing"]


class Status:
    """Step and state, set by the training loop. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._state: State = "loading"
        self._since = clock()

    def set(self, state: State, step: int | None = None) -> None:
        """Enter a state; entering the same one again does not restart its time."""
        with self._lock:
            if state != self._state:
                self._state, self._since = state, self._clock()
            self._step = self._step if step is None else step

    def heartbeat(self, bytes_served: int, rate: Rate | None = None, *, model_stored: bool = False) -> LearnerHeartbeat:
        """The message of this moment. `rate`: what the relay has measured since the last one."""
        with self._lock:
            waited = self._clock() - self._since if self._state == "waiting" else 0.0
            return LearnerHeartbeat(
                step=self._step,
                state=self._state,
                waiting_for_s=max(0.0, waited),
                bytes_served=bytes_served,
                up_bytes_per_s=None if rate is None else rate.bytes_per_s,
                up_limited=rate is not None and rate.limited,
                model_stored=model_stored,
            )


class Heart:
    """A thread that sends heartbeats and takes in the directives of the answers."""

    def __init__(
        self,
        control: Control,
        status: Status,
        directives: Directives,
        bytes_served: Callable[[], int],
        *,
        uplink: Callable[[], Rate | None] = lambda: None,
        model_stored: Callable[[], bool] = lambda: False,
        period_s: float = PERIOD_S,
    ) -> None:
        self._control = control
        self._status = status
        self._directives = directives
        self._bytes_served = bytes_served
        self._uplink = uplink
        self._model_stored = model_stored
        self._period_s = period_s
        self._stopped = threading.Event()
        self._thread = watched("heart", self._run, directives.fail)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Beat no more."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                stored = self._model_stored()
                beat = self._status.heartbeat(self._bytes_served(), self._uplink(), model_stored=stored)
                before = self._directives.answers
                self._directives.update(self._control.heartbeat(beat), sent_at=before)
            except Unavailable as error:
                log.info("heartbeat: %s", error.detail)
            except EchoError as error:
                self._directives.fail(error)
                return
            self._stopped.wait(self._period_s)
