from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from app.protocol.errors import Unauthorized
from app.rollout_agent.client import NodeClient
from app.rollout_agent.leasing import MAX_REQUESTS, WorkSource
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from tests.unit.rollout_agent.fakes import problem


class Desk:
    """A control service that holds requests for work until the test answers them."""

    def __init__(self) -> None:
        self.version = 0
        self.waiting: dict[int, asyncio.Future[httpx.Response]] = {}
        self._news = asyncio.Condition()
        self.ledger = WorkLedger(lambda: 0.0)
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._handle))
        self.source = WorkSource(
            NodeClient("http://control", http), self.ledger, lambda: self.version, clock=lambda: 0.0, sleep=self._sleep
        )

    async def _sleep(self, _: float) -> None:
        await asyncio.sleep(0)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        version = json.loads(request.content)["policy_version"]
        assert version not in self.waiting
        answer: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        self.waiting[version] = answer
        async with self._news:
            self._news.notify_all()
        return await answer

    async def asked(self, version: int) -> None:
        """Wait until work is asked for under a version."""
        async with asyncio.timeout(5):
            async with self._news:
                await self._news.wait_for(lambda: version in self.waiting)

    def grant(self, version: int, item: str) -> None:
        """Answer a request with one item."""
        work = {"id": item, "prompt_index": 0, "group_size": 2, "seed": 0, "deadline_s": 60}
        body = {"items": [work], "upload": {"key": item, "url": "http://store/x"}}
        self.waiting.pop(version).set_result(httpx.Response(200, json=body))


async def test_a_new_version_asks_beside_the_running_request_and_no_answer_is_lost() -> None:
    desk = Desk()
    first = asyncio.create_task(desk.source.next(4))
    await desk.asked(0)
    desk.version = 1
    desk.source.wake()
    assert await first is None
    second = asyncio.create_task(desk.source.next(4))
    await desk.asked(1)
    desk.grant(1, "new")
    batch = await second
    assert batch is not None
    assert [item.id for item in batch.items] == ["new"]
    third = asyncio.create_task(desk.source.next(4))
    desk.grant(0, "old")
    batch = await third
    assert batch is not None
    assert [item.id for item in batch.items] == ["old"]
    assert desk.ledger.in_flight == 2
    await desk.source.close()


async def test_waking_without_a_new_version_asks_nothing_more() -> None:
    desk = Desk()
    for _ in range(3):
        waiting = asyncio.create_task(desk.source.next(4))
        await desk.asked(0)
        desk.source.wake()
        assert await waiting is None
    assert list(desk.waiting) == [0]
    await desk.source.close()


async def test_there_is_an_end_to_requests_side_by_side() -> None:
    desk = Desk()
    for version in range(MAX_REQUESTS + 3):
        desk.version = version
        waiting = asyncio.create_task(desk.source.next(4))
        if version < MAX_REQUESTS:
            await desk.asked(version)
        else:
            await asyncio.sleep(0)
        desk.source.wake()
        assert await waiting is None
    assert len(desk.waiting) == MAX_REQUESTS
    await desk.source.close()


@pytest.mark.parametrize(("answer", "error"), [(problem("unauthorized", 401), Unauthorized)])
async def test_a_node_that_is_over_is_told(answer: httpx.Response, error: type[Exception]) -> None:
    desk = Desk()
    waiting = asyncio.create_task(desk.source.next(4))
    await desk.asked(0)
    desk.waiting.pop(0).set_result(answer)
    with pytest.raises(error):
        await waiting


async def test_requests_that_are_refused_again_and_again_are_a_fault() -> None:
    desk = Desk()
    for fault in range(1, MAX_FAULTS + 1):
        waiting = asyncio.create_task(desk.source.next(4))
        await desk.asked(0)
        desk.waiting.pop(0).set_result(problem("invalid_request", 422))
        if fault < MAX_FAULTS:
            assert await waiting is None
    with pytest.raises(WorkerFault, match="work_refused"):
        await waiting
