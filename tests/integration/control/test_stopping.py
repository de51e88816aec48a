"""The end of the service, in the middle of whatever it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest

from providers.base import Listing
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import FakeClock, World, machines

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


@dataclass
class Silent(FakeProvider):
    """Never answers when it is asked for its list, once it was told to."""

    silent: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def list(self) -> Listing:
        """As the switch says."""
        if self.silent:
            self.asked.set()
            await asyncio.Event().wait()
        return await super().list()


async def test_a_round_that_waits_for_a_provider_does_not_hold_up_the_end(
    open_world: OpenWorld, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Silent(clock, machines(9.0), name="silent")
    async with open_world(others=[silent], tick_seconds=1) as control:
        loop = control.svc.loop
        await loop.start()
        silent.silent = True
        clock.advance(60)
        async with asyncio.timeout(10):
            await silent.asked.wait()
        async with asyncio.timeout(5):
            await loop.stop()
    worse = [r for r in caplog.records if r.exc_info or r.levelno >= logging.WARNING]
    assert [r.getMessage() for r in worse] == []


async def test_a_round_that_is_at_work_ends_by_itself(
    control: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A statement of the database that is cut off leaves a connection in an unknown state, and says so at length."""
    loop = control.svc.loop
    await loop.start()
    at_work, go_on = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def look() -> None:
        at_work.set()
        await go_on.wait()
        ended.append("strays")

    async def check() -> None:
        ended.append("balances")

    monkeypatch.setattr(loop.strays, "look", look)
    monkeypatch.setattr(loop.accounts, "check", check)
    async with asyncio.timeout(10):
        while not at_work.is_set():
            control.svc.core.signals.notify("tick")
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(loop.stop())
        for _ in range(50):  # what is cancelled hears of it in one of these turns
            await asyncio.sleep(0)
        go_on.set()
        await stopping
    assert ended == ["strays"]
    assert [r.getMessage() for r in caplog.records if r.exc_info] == []
