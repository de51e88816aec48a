"""Calls of a plug-in's code side by side, none of which is waited for longer than its time.

Invariant: a call's time begins when the call does, so that it doesn't matter how many there are; one that hangs costs a
thread, and keeps no other from being made until so many hang that threads have to be saved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from app.protocol.errors import EchoError, TaskFailed

T = TypeVar("T")
MOST_HUNG = 8
"""With so many calls that were given up and still run, no other is begun."""


class Bounded:
    """For one thread: `at_once` calls side by side, each for `timeout_s` seconds."""

    def __init__(self, at_once: int, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._clock = clock
        # Enough for those that hang, too: what is submitted begins at once.
        self._pool = ThreadPoolExecutor(at_once + MOST_HUNG, thread_name_prefix="audit-rewards")
        self._hung: list[Future[Any]] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | TaskFailed]:
        """What each call gives, or why it gives nothing."""
        found: dict[int, T | TaskFailed] = {}
        waiting = deque(enumerate(calls))
        running: dict[Future[T], tuple[int, float]] = {}
        while waiting or running:
            while waiting and len(running) < self._at_once:
                number, call = waiting.popleft()
                if self._stuck():
                    found[number] = TaskFailed(f"is not begun: {MOST_HUNG} others hang")
                else:
                    until = self._clock() + self._timeout_s
                    running[self._pool.submit(call)] = number, until
            ended = self._ended(running)
            found.update(ended)
        return [found[number] for number in range(len(calls))]

    def _ended(self, running: dict[Future[T], tuple[int, float]]) -> dict[int, T | TaskFailed]:
        """Wait for those that end next, in whatever way, and take them out."""
        if not running:
            return {}
        soonest = min(until for _, until in running.values())
        done, _ = wait(running, max(0.0, soonest - self._clock()), FIRST_COMPLETED)
        now = self._clock()
        late = [future for future, (_, until) in running.items() if future not in done and until <= now]
        self._hung += late
        found: dict[int, T | TaskFailed] = {}
        for future in done:
            error = future.exception()
            found[running.pop(future)[0]] = future.result() if error is None else _failure(error)
        for future in late:
            found[running.pop(future)[0]] = TaskFailed(f"takes longer than {self._timeout_s:g} s")
        return found

    def _stuck(self) -> bool:
        self._hung = [future for future in self._hung if not future.done()]
        return len(self._hung) >= MOST_HUNG

    def close(self) -> None:
        """Begin nothing more; what hangs is left to hang."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _failure(error: BaseException) -> TaskFailed:
    # A task is a plug-in and may raise anything.
    return TaskFailed(f"failed: {error.detail if isinstance(error, EchoError) else repr(error)}"[:400])
