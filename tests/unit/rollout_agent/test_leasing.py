from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from app.protocol.errors import Unauthorized, Unavailable
from app.rollout_agent.client import NodeClient
from app.rollout_agent.leasing import MAX_REQUESTS, WorkSource
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from tests.unit.rollout_agent.fakes import Clock, Wire, problem


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


async def test_a_wake_ends_one_wait_and_not_the_next() -> None:
    desk = Desk()
    first = asyncio.create_task(desk.source.next(4))
    await desk.asked(0)
    desk.source.wake()
    assert await first is None
    second = asyncio.create_task(desk.source.next(4))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    desk.grant(0, "late")
    assert await second is not None
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


class Waiting:
    """A work source on a wire, and how long it paused."""

    def __init__(self, *answers: httpx.Response, takes_s: float = 0.0, version: int | None = 7) -> None:
        self.clock = Clock()
        self.left = list(answers)
        self.takes_s = takes_s
        self.wire = Wire({"work": self._answer})
        self.ledger = WorkLedger(self.clock)
        self.pauses: list[float] = []
        self.source = WorkSource(
            self.wire.client(self.clock), self.ledger, lambda: version,
            clock=self.clock, sleep=self._sleep, jitter=lambda: 1.0,
        )  # fmt: skip

    def _answer(self, _: dict[str, object]) -> httpx.Response:
        self.clock.now += self.takes_s
        return self.left.pop(0)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


NOTHING = httpx.Response(200, json={"items": [], "reason": "no_work"})


def work(*items: str) -> httpx.Response:
    rows = [{"id": i, "prompt_index": 0, "group_size": 2, "seed": 0, "deadline_s": 60 + n} for n, i in enumerate(items)]
    return httpx.Response(200, json={"items": rows, "upload": {"key": "k", "url": "http://store/x"}})


async def test_a_lease_runs_from_the_answer_on_and_is_in_the_ledger() -> None:
    case = Waiting(work("a", "b"), takes_s=1.5)
    batch = await case.source.next(4)
    assert batch is not None
    assert batch.deadlines == {"a": 1061.5, "b": 1062.5}
    assert batch.slot is not None
    assert batch.slot.key == "k"
    assert sorted(case.ledger.unfinished()) == ["a", "b"]
    assert case.wire.of("work") == [{"max_items": 4, "policy_version": 7, "wait_s": 2.0}]
    assert case.pauses == []


@pytest.mark.parametrize(("takes_s", "pauses"), [(2.0, []), (0.0, [0.1])])
async def test_no_work_is_asked_for_again_at_once_only_if_the_poll_has_waited(
    takes_s: float, pauses: list[float]
) -> None:
    case = Waiting(NOTHING, takes_s=takes_s)
    assert await case.source.next(4) is None
    assert (case.pauses, case.ledger.in_flight) == (pauses, 0)


async def test_a_service_that_is_away_is_asked_less_and_less_often_and_that_is_no_fault() -> None:
    away = [httpx.Response(503), problem("conflict", 409), httpx.Response(503)]
    case = Waiting(*away, NOTHING, httpx.Response(503), takes_s=1.0)
    for _ in range(5):
        assert await case.source.next(4) is None
    assert case.pauses == [0.25, 0.5, 1.0, 0.25], "from the beginning once it has answered"
    assert (case.ledger.faults_in_a_row, dict(case.ledger.errors)) == (0, {})


async def test_no_work_is_leased_without_a_version() -> None:
    case = Waiting(version=None)
    with pytest.raises(Unavailable, match="without an installed version"):
        await case.source.next(4)
    assert case.wire.calls == []


async def test_a_source_that_is_closed_has_given_up_its_requests() -> None:
    desk = Desk()
    waiting = asyncio.create_task(desk.source.next(4))
    await desk.asked(0)
    answer = desk.waiting[0]
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not answer.done(), "who no longer waits has not given the request up"
    await desk.source.close()
    assert answer.cancelled()
    assert desk.ledger.in_flight == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
