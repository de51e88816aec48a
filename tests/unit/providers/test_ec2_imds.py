"""The metadata service on the machine, scripted."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import httpx
import pytest

from providers.base import MalformedAnswer, Notice, Transient
from providers.ec2.imds import Imds, watch

ACTION, ADVICE = "spot/instance-action", "events/recommendations/rebalance"
WARNED = '{"action":"terminate","time":"2026-06-01T12:02:00Z"}'
ADVISED = '{"noticeTime":"2026-06-01T11:50:00Z"}'
INTERRUPTION = Notice("ec2", "i-1", "interruption", datetime(2026, 6, 1, 12, 2, tzinfo=UTC))
REBALANCE = Notice("ec2", "i-1", "rebalance", datetime(2026, 6, 1, 11, 50, tzinfo=UTC))


class Machine:
    """A machine's metadata service: one set of values a round; a token is good for `uses` questions."""

    def __init__(self, *rounds: Mapping[str, str], uses: int = 1000) -> None:
        self.rounds = list(rounds)
        self.uses = uses
        self.left = 0
        self.tokens = 0
        self.slept: list[float] = []
        self.down = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            self.down -= 1
            raise httpx.ConnectError("no route")
        if request.method == "PUT":
            assert request.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            self.tokens += 1
            self.left = self.uses
            return httpx.Response(200, text=f"token-{self.tokens}")
        if request.headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}" or self.left <= 0:
            return httpx.Response(401)
        self.left -= 1
        path = request.url.path.removeprefix("/latest/meta-data/")
        text = {"instance-id": "i-1", **self.rounds[0]}.get(path)
        return httpx.Response(404) if text is None else httpx.Response(200, text=text)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.rounds) > 1:
            self.rounds.pop(0)

    def imds(self) -> Imds:
        return Imds(httpx.MockTransport(self))


async def test_each_notice_comes_once_and_the_interruption_is_the_last() -> None:
    machine = Machine({}, {ADVICE: ADVISED}, {ADVICE: ADVISED}, {ADVICE: ADVISED, ACTION: WARNED})
    assert [n async for n in watch(machine.imds(), sleep=machine.sleep)] == [REBALANCE, INTERRUPTION]
    assert machine.slept == [5.0, 5.0, 5.0]
    assert machine.tokens == 1


async def test_a_spent_token_is_renewed() -> None:
    machine = Machine({ACTION: WARNED}, uses=2)
    imds = machine.imds()
    assert await imds.poll() == [INTERRUPTION]
    assert machine.tokens == 2


async def test_a_service_that_does_not_answer_is_asked_again() -> None:
    machine = Machine({ACTION: WARNED})
    machine.down = 3
    assert [n async for n in watch(machine.imds(), sleep=machine.sleep)] == [INTERRUPTION]
    assert len(machine.slept) == 3


async def test_off_ec2_and_after_rubbish_one_poll_raises() -> None:
    machine = Machine({})
    machine.down = 1
    with pytest.raises(Transient):
        await machine.imds().poll()
    for text in ("soon", "[]", "{}", '{"time": 3}'):
        with pytest.raises(MalformedAnswer):
            await Machine({ACTION: text}).imds().poll()


async def test_a_service_that_gives_no_good_token_raises() -> None:
    with pytest.raises(Transient):
        await Machine({}, uses=0).imds().poll()
