"""A part that does not come to an end does not keep the others from theirs."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from app.rollout_agent.closing import close_parts, end_within, ended
from app.rollout_agent.hosting import BatchHost
from tests.unit.rollout_agent.fakes import ScriptedEngine


class StuckRelay:
    async def stop(self) -> None:
        raise TimeoutError


async def test_a_relay_that_does_not_stop_keeps_neither_engine_nor_connections(tmp_path: Path) -> None:
    engine_pool, score_pool = ThreadPoolExecutor(1, "engine"), ThreadPoolExecutor(1, "score")
    http = httpx.AsyncClient()
    freed_in: list[str] = []

    class Engine(ScriptedEngine):
        def close(self) -> None:
            freed_in.append(threading.current_thread().name)

    with pytest.raises(TimeoutError):
        await close_parts(StuckRelay(), http, BatchHost(Engine(), tmp_path, engine_pool).close, engine_pool, score_pool)
    assert http.is_closed
    assert [name.partition("_")[0] for name in freed_in] == ["engine"]
    for pool in (engine_pool, score_pool):
        with pytest.raises(RuntimeError, match="shutdown"):
            pool.submit(threading.get_ident)


async def test_threads_that_hang_are_not_waited_for_and_what_is_queued_behind_them_is_dropped() -> None:
    over = threading.Event()
    pools = ThreadPoolExecutor(1, "engine"), ThreadPoolExecutor(1, "score")
    hanging = [pool.submit(over.wait, 10) for pool in pools]
    queued = [pool.submit(over.wait, 10) for pool in pools]

    async def free() -> None:
        """The engine is free."""

    try:
        await close_parts(None, httpx.AsyncClient(transport=httpx.MockTransport(httpx.Response)), free, *pools)
        assert not any(future.done() for future in hanging)
        assert all(future.cancelled() for future in queued)
    finally:
        over.set()


LONG_S = 60.0


async def for_ever() -> None:
    await asyncio.Event().wait()


async def ignoring(over: asyncio.Event) -> None:
    """Work that goes on when it is cancelled for the first time."""
    try:
        await for_ever()
    except asyncio.CancelledError:
        await over.wait()


def never() -> bool:
    raise AssertionError("nobody was cancelled")


async def test_the_end_of_work_is_waited_for_and_what_it_raises_is_raised() -> None:
    async def fails() -> None:
        raise RuntimeError("no memory")

    await ended(asyncio.create_task(asyncio.sleep(0)), never, LONG_S)
    with pytest.raises(RuntimeError, match="no memory"):
        await ended(asyncio.create_task(fails()), never, LONG_S)


async def test_work_that_somebody_else_cancels_is_simply_over() -> None:
    work = asyncio.create_task(for_ever())
    waiting = asyncio.create_task(ended(work, never, LONG_S))
    await asyncio.sleep(0)
    work.cancel()
    assert await asyncio.wait_for(waiting, 10) is None


@pytest.mark.parametrize(
    ("of_use", "within_s", "finishes"), [(True, LONG_S, True), (True, 0.001, False), (False, LONG_S, False)]
)
async def test_who_is_cancelled_hastens_the_work_and_waits_only_where_that_is_of_use(
    of_use: bool, within_s: float, finishes: bool
) -> None:
    told, done = asyncio.Event(), False

    async def work() -> None:
        nonlocal done
        await told.wait()
        if not finishes:
            await for_ever()
        done = True

    def hasten() -> bool:
        told.set()
        return of_use

    task = asyncio.create_task(work())
    waiting = asyncio.create_task(ended(task, hasten, within_s))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 10)
    assert (told.is_set(), task.done(), done) == (True, True, finishes)


async def test_tasks_are_left_their_time_then_cancelled_and_then_left_behind() -> None:
    over = asyncio.Event()
    quick, slow, deaf = (asyncio.create_task(work) for work in (asyncio.sleep(0), for_ever(), ignoring(over)))
    await asyncio.wait_for(end_within([quick], LONG_S), 10)
    await asyncio.wait_for(end_within([quick, slow, deaf], 0.001), 10)
    assert not quick.cancelled()
    assert slow.cancelled()
    assert not deaf.done()
    over.set()
    await deaf
