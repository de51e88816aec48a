"""Wakes coroutines when something changed, from any thread and into any event loop.

Invariant: a change after `count` was read is never missed: `wait(seen)` returns at once if the count moved on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Changes:
    """A counter of changes that coroutines can wait on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    @property
    def count(self) -> int:
        """How often `notify` was called. Read it first, then the state, then `wait(count)`."""
        return self._count

    def notify(self) -> None:
        """Something changed: wake everybody."""
        with self._lock:
            self._count += 1
            if not self._waiters:
                return
            waiters, self._waiters = self._waiters, set()
        here = asyncio._get_running_loop()
        for loop, future in waiters:
            if loop is here:  # no need to wake it
                _wake(future)
                continue
            # A loop that was closed meanwhile has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    async def wait(self, seen: int, timeout_s: float) -> bool:
        """Until the count differs from `seen`: True; False when `timeout_s` seconds passed first."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._count != seen:
                return True
            waiter = (loop, loop.create_future())
            self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter[1]
        except TimeoutError:
            return False
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        return True


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
