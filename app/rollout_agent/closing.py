"""The end of a node's parts.

Invariant: each part is ended, whatever the end of another one raises or however long it takes, and that within a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Protocol

import httpx


class Stoppable(Protocol):
    """The part of a relay that is used here; its `stop` ends within a time."""

    async def stop(self) -> None: ...


async def ended(work: asyncio.Task[None], hasten: Callable[[], bool], within_s: float) -> None:
    """Wait for the end of a task. Who is cancelled meanwhile hastens it, and if that is of use (True) leaves it so many
    seconds; then it is cancelled. Raises what it raises, but not that it was cancelled by somebody else."""
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        if hasten():
            await asyncio.wait({work}, timeout=within_s)
        raise
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    if not work.cancelled():
        work.result()


async def end_within(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    """Wait for tasks, at least one; those that are not done by then are cancelled, and given the same time again."""
    _, rest = await asyncio.wait(tasks, timeout=seconds)
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=seconds)


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
