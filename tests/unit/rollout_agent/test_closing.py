"""A part that does not come to an end does not keep the others from theirs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from app.rollout_agent.closing import close_parts
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
