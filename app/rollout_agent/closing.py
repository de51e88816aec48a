"""The end of a node's parts.

Invariant: each part is ended, whatever the end of another one raises or however long it takes, and that within a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Protocol

import httpx


class Stoppable(Protocol):
    """The part of a relay that is used here; its `stop` ends within a time."""

    async def stop(self) -> None: ...


async def close_parts(
    relay: Stoppable | None,
    http: httpx.AsyncClient,
    free_engine: Callable[[], Awaitable[None]],
    engine_pool: Executor,
    score_pool: Executor,
) -> None:
    """Stop serving, then free the engine. TimeoutError when one of the two doesn't end.

    Threads that hang in a task's reward are not waited for.
    """
    async with AsyncExitStack() as parts:  # ends them in reverse order, all of them
        parts.callback(engine_pool.shutdown, wait=False, cancel_futures=True)
        parts.push_async_callback(free_engine)
        parts.callback(score_pool.shutdown, wait=False, cancel_futures=True)
        parts.push_async_callback(http.aclose)
        if relay is not None:
            parts.push_async_callback(relay.stop)
