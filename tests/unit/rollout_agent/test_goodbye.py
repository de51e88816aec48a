"""The last word is short, late for nobody; and a machine that nobody else may end is paid for until it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import chain, pairwise, repeat
from typing import Any, cast

import httpx
import pytest

from app.protocol.errors import EchoError, Gone, Unavailable
from app.protocol.node import Leave
from app.rollout_agent import goodbye
from app.rollout_agent.client import NodeClient
from app.rollout_agent.config import SelfDestruct
from app.rollout_agent.goodbye import DESTROY_S, LONGEST_PAUSE_S, MOST_UNFINISHED, destroy_machine, leave
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.lifecycle import Ending
from tests.unit.rollout_agent.fakes import Clock

Answer = Callable[[httpx.Request], httpx.Response]


def says(status: int, **body: Any) -> Answer:
    return lambda _: httpx.Response(status, json=body)


def nothing(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


GONE, BAD_KEY = says(404, success=False, error="no_such_instance"), says(404, success=False, error="auth_error")
BUSY = says(429, detail="API requests too frequent endpoint threshold=4.5")


class Market:
    """Gives these answers one after the other, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[tuple[float, httpx.Request]] = []
        self.clock = Clock()
        self._answers = chain(answers, repeat(answers[-1]))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((self.clock.now, request))
        return next(self._answers)(request)

    async def ended(self) -> None:
        """A machine tries to end itself there."""
        machine = SelfDestruct("https://vast.example", "4711", "k3y")
        async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as http:
            await destroy_machine(http, machine, clock=self.clock, sleep=self.clock.sleep)

    @property
    def pauses(self) -> list[float]:
        times = [at for at, _ in self.asked]
        return [b - a for a, b in pairwise(times)]


class Control:
    """Hears last words, unless it raises `error` or is silent."""

    def __init__(self, error: EchoError | None = None, *, silent: bool = False) -> None:
        self.heard: list[Leave] = []
        self._error, self._silent = error, silent

    async def leave(self, word: Leave) -> None:
        if self._silent:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        self.heard.append(word)

    async def told(self, ending: Ending, items: int = 1) -> None:
        """A node that had so many items leases leaves."""
        clock = Clock()
        ledger = WorkLedger(clock)
        ledger.leased({f"w{n}": clock.now + 60 for n in range(items)})
        ledger.sampled(7)
        ledger.waste("interrupted", 3)
        await leave(cast(NodeClient, self), ledger, ending)


async def test_the_last_word_says_why_what_is_given_back_and_the_totals() -> None:
    control = Control()
    await control.told(Ending("r" * 600, unfit=True), MOST_UNFINISHED + 1)
    [word] = control.heard
    assert (word.reason, word.unfit) == ("r" * 500, True)
    assert word.unfinished == [f"w{n}" for n in range(MOST_UNFINISHED)], "more are not taken: they come back anyway"
    assert (word.tokens_generated, word.tokens_wasted) == (7, {"interrupted": 3})


@pytest.mark.parametrize("control", [Control(Gone("over")), Control(Unavailable("away")), Control(silent=True)])
async def test_a_last_word_that_is_not_heard_keeps_nobody(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(goodbye, "LEAVE_TIMEOUT_S", 0.05)
    await asyncio.wait_for(control.told(Ending("drained")), 15)
    assert "leaving was not heard" in caplog.text


@pytest.mark.parametrize("answer", [says(200, success=True), lambda _: httpx.Response(204), GONE])
async def test_a_machine_that_has_ended_is_asked_for_nothing_more(answer: Answer) -> None:
    market = Market(answer)
    await market.ended()
    [(_, asked)] = market.asked
    assert (asked.method, str(asked.url)) == ("DELETE", "https://vast.example/api/v0/instances/4711/")
    assert asked.headers["authorization"] == "Bearer k3y"


@pytest.mark.parametrize(
    "answer",
    [
        nothing, BUSY, BAD_KEY, lambda _: httpx.Response(502, text="<html>"), says(410, detail="this call is no more"),
        says(200, success=False, error="server_error"), lambda _: httpx.Response(404, text="no such page"),
    ],
)  # fmt: skip
async def test_any_other_answer_does_not_end_the_trying(answer: Answer) -> None:
    market = Market(answer, answer, answer, answer, says(200, success=True))
    await market.ended()
    assert market.pauses == [1.0, 2.0, 4.0, 8.0], "a marketplace that is asked too often refuses the next one, too"


async def test_it_is_tried_for_its_time_and_every_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    market = Market(BAD_KEY)
    with caplog.at_level(logging.WARNING):
        await market.ended()
    assert DESTROY_S - LONGEST_PAUSE_S <= market.clock.now - 1000.0 <= DESTROY_S
    assert max(market.pauses) == LONGEST_PAUSE_S
    assert caplog.text.count("ending the machine failed: HTTP 404 (auth_error)") == len(market.asked)
    assert "it may still be paid for" in caplog.text
    assert "k3y" not in caplog.text
