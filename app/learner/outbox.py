"""Reports to the control service, in order, without holding up the training.

Invariant: a step or evaluation report is in `pending` (and so in every checkpoint written meanwhile) until the control
service has acknowledged it; reports leave in the order in which they were put in.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from app.learner.client import Control
from app.learner.threads import watched
from app.protocol.errors import EchoError, LearnerError
from app.protocol.learner import Drops, EvalReport, LearnerDirectives, Published, StalenessMove, StepReport

log = logging.getLogger(__name__)
Message = StepReport | EvalReport | Published | Drops
FLUSH_S = 660.0
"""Longer than the client's patience, so that its error comes first."""


class Directives:
    """The newest word of the control service, and the first failure of any background thread. Thread-safe.

    Invariant: S is never greater than what the learner asked for last, nor than what the control service said last.
    """

    def __init__(self, first: LearnerDirectives) -> None:
        self._current = first
        self._asked: StalenessMove | None = None
        self._failure: EchoError | None = None
        self._lock = threading.Lock()
        self.answers = 0
        """To reports, that were taken in."""
        self.urgent = threading.Event()
        """Set when something other than `run` is wanted or a thread failed."""

    def update(self, directives: LearnerDirectives, *, sent_at: int | None = None) -> None:
        """Take in an answer to a report, or to a heartbeat that was sent when there had been `sent_at` of those: one
        that the answer to a report has overtaken may be older, and is left to the next heartbeat."""
        with self._lock:
            if sent_at is None:
                self.answers += 1
            elif sent_at != self.answers:
                return
            self._current = directives
            if directives.command == "run" and self._failure is None:
                self.urgent.clear()
            else:
                self.urgent.set()

    def ask(self, move: StalenessMove) -> None:
        """A step's report asks for this. A lower S holds from here on, a greater one once the control service says so.

        Answers may overtake each other, and one from before the report would bring the old S back. So the lower of the
        two holds for good: only the learner ever asks for more.
        """
        with self._lock:
            self._asked = move

    def fail(self, error: EchoError) -> None:
        """A background thread ends with this error; the first one counts."""
        with self._lock:
            self._failure = self._failure or error
            self.urgent.set()

    def current(self) -> LearnerDirectives:
        """What is wanted now. Raises the failure of a background thread."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return _held(self._current, self._asked)


def _held(told: LearnerDirectives, asked: StalenessMove | None) -> LearnerDirectives:
    if asked is None or asked.staleness_budget >= told.staleness_budget:
        return told
    period = min(told.publish_period, asked.publish_period)
    return told.model_copy(update={"staleness_budget": asked.staleness_budget, "publish_period": period})


class Outbox:
    """A thread that sends what `put` gives it."""

    def __init__(self, control: Control, directives: Directives) -> None:
        self._control = control
        self._directives = directives
        self._queue: deque[Message] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = watched("outbox", self._run, directives.fail)

    def start(self) -> None:
        """Begin sending."""
        self._thread.start()

    def put(self, message: Message) -> None:
        """Queue a message."""
        with self._changed:
            self._queue.append(message)
            self._changed.notify_all()

    def pending(self) -> tuple[list[StepReport], list[EvalReport]]:
        """What is not acknowledged yet."""
        with self._changed:
            waiting = list(self._queue)
        return [m for m in waiting if isinstance(m, StepReport)], [m for m in waiting if isinstance(m, EvalReport)]

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is acknowledged. Raises the failure of a thread, LearnerError after `timeout_s`."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._queue or self._stopped, timeout_s)
        self._directives.current()
        if not done:
            raise LearnerError(f"reports were not acknowledged within {timeout_s:.0f} s")

    def stop(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopped, 60)
                if self._stopped:
                    return
                if not self._queue:
                    continue
                message = self._queue[0]
            try:
                self._directives.update(self._send(message))
            except EchoError as error:
                self._directives.fail(error)
                self.stop()
                return
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _send(self, message: Message) -> LearnerDirectives:
        match message:
            case StepReport():
                return self._control.step(message)
            case EvalReport():
                return self._control.evaluation(message)
            case Published():
                return self._control.published(message)
            case Drops():
                return self._control.drops(message)
