"""The local marketplace in this process, on the test's clock: vast.ai's adapter, API and bill, without machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from fastapi import FastAPI

from providers.marketplace import MarketConfig, auction
from providers.marketplace.clock import NS
from providers.marketplace.contract import Contract, State
from providers.marketplace.market import Market
from providers.marketplace.server import create_app
from providers.vastai import VastAI
from tests.integration.control.rig import FakeClock, Node_, World

KEY = "vk-7f3c9a51d2e8406b-distinctive"
NO_PID = 2**22 + 1
"""No process has this number."""


class MarketClock:
    """The test's clock in nanoseconds."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def now_ns(self) -> int:
        """Now."""
        return round(self.clock.now * NS)


@dataclass
class Vast:
    """One account at the marketplace."""

    app: FastAPI
    adapter: VastAI
    clock: FakeClock

    @property
    def market(self) -> Market:
        """Its inside."""
        found: Market = self.app.state.market
        return found

    @property
    def calls(self) -> dict[str, int]:
        """Requests so far, by call."""
        return dict(self.app.state.requests.calls)

    def fault(self, call: str, kind: str) -> None:
        """The next such call goes wrong."""
        self.app.state.faults.add({"call": call, "kind": kind})

    def live(self) -> list[Contract]:
        """Contracts that are not destroyed."""
        return self.market.live()

    def turn(self) -> None:
        """What the marketplace's own clockwork would do: machines start, outbid ones stop, ended ones are let again."""
        for contract in self.market.live():
            if contract.state is State.LOADING and contract.due_ns <= self.market.clock.now_ns():
                self.market.running(contract, NO_PID, 0.0)
        auction.decide(self.market)
        for contract in self.market.contracts.values():
            if contract.state is State.DESTROYED and self.market.machine_of(contract).tenant == contract.id:
                self.market.vacate(contract)

    async def join(self, control: World, contract: Contract) -> Node_:
        """The machine's agent comes up and works."""
        node = Node_(control, contract.order.env["ECHO2_JOIN_TOKEN"])
        await node.join()
        await node.beat()
        return node

    async def rounds(self, control: World, count: int, seconds: float) -> None:
        """Rounds of the service, the marketplace moving between them."""
        for _ in range(count):
            self.clock.advance(seconds)
            self.turn()
            await control.round()


@contextlib.contextmanager
def _closed(app: FastAPI) -> Iterator[None]:
    try:
        yield
    finally:
        app.state.market.close()


@contextlib.asynccontextmanager
async def vast_market(
    state_dir: Path, clock: FakeClock, *, rate_limits: bool = False, start_delay_s: float = 1.0
) -> AsyncIterator[Vast]:
    """A marketplace and an account at it. With `rate_limits` the adapter's waiting moves the test's clock."""
    config = MarketConfig(
        state_dir, KEY, control_enabled=True, rate_limits=rate_limits, rate_scale=1.0, start_delay_s=start_delay_s
    )
    app = create_app(config, MarketClock(clock))

    asleep: list[float] = []

    async def sleep(seconds: float) -> None:
        """Time moves to the earliest sleeper, once everything else has come to rest."""
        wake = clock.now + seconds
        asleep.append(wake)
        while clock.now < wake:
            for _ in range(100):
                await asyncio.sleep(0)
            if wake == min(asleep):
                clock.now = max(clock.now, wake)
        asleep.remove(wake)

    adapter = VastAI(
        "vastai", "http://vast.test", KEY, transport=httpx.ASGITransport(app=app),
        clock=lambda: datetime.fromtimestamp(clock.now, UTC), monotonic=clock, sleep=sleep,
        interval_scale=1.0 if rate_limits else 0.0,
    )  # fmt: skip
    with _closed(app):
        try:
            yield Vast(app, adapter, clock)
        finally:
            await adapter.aclose()
