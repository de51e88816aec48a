"""A running marketplace with an adapter pointed at it and its control side at hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import httpx
import psutil

from providers.base import Billing, Instance, Offer, OfferQuery, Phase, RentResult, RentSpec
from providers.marketplace import MarketServer
from providers.vastai import VastAI

KEY = "test-key-0123"
DEADLINE_S = 20.0
T = TypeVar("T")


async def until(read: Callable[[], Awaitable[T]], good: Callable[[T], bool], what: str) -> T:
    """Poll until `good`; fails with `what` and the last value at the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while True:
        value = await read()
        if good(value):
            return value
        if loop.time() > end:
            raise AssertionError(f"{what} did not happen; last seen: {value}")
        await asyncio.sleep(0.02)


@dataclass
class Rig:
    """One marketplace under test."""

    server: MarketServer
    provider: VastAI
    http: httpx.AsyncClient

    async def control(self, method: str, path: str, body: Any = None) -> Any:
        """A call to the control side; returns its JSON."""
        answer = await self.http.request(method, f"/_market/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    async def state(self) -> Any:
        """The marketplace's own view."""
        return await self.control("GET", "state")

    async def seen(self) -> Any:
        """Requests that arrived."""
        return await self.control("GET", "requests")

    async def fault(self, call: str, kind: str, count: int = 1) -> None:
        """Order a fault."""
        await self.control("POST", "faults", {"call": call, "kind": kind, "count": count})

    async def offer(self, gpu: str = "RTX 4090", billing: Billing = Billing.ON_DEMAND) -> Offer:
        """The cheapest offer of a card."""
        return (await self.provider.search(OfferQuery(billing, (gpu,))))[0]

    async def rent(self, onstart: str, *, bid: int | None = None, gpu: str = "RTX 4090", **spec: Any) -> RentResult:
        """Rent the cheapest offer of a card."""
        offer = await self.offer(gpu, Billing.ON_DEMAND if bid is None else Billing.SPOT_BID)
        values = {"label": "echo2:f:l:1", "image": "img", "env": {}, "disk_gb": 10.0, **spec}
        return await self.provider.rent(offer, RentSpec(onstart=onstart, bid_micros_h=bid, **values))

    async def phase(self, instance_id: str | None, phase: Phase) -> Instance:
        """Wait until an instance is in a phase."""
        assert instance_id is not None

        async def read() -> Instance | None:
            return await self.provider.get(instance_id)

        found = await until(read, lambda i: i is not None and i.phase is phase, f"phase {phase.value}")
        assert found is not None
        return found

    async def log(self, instance_id: str | None, text: str) -> str:
        """Wait until an instance has printed `text`; returns all its output."""
        assert instance_id is not None
        return await until(lambda: self.provider.logs(instance_id, 1000), lambda out: text in out, f"output {text!r}")

    async def quiet(self) -> Any:
        """Wait until no machine process is left; returns the state."""
        return await until(self.state, lambda s: s["running"] == 0, "the end of all machine processes")

    async def gpu_bill_stands_still(self) -> None:
        """Wait until the disk has been billed for longer than the GPU, which thus is billed no more."""

        async def lead() -> float:
            charges = await self.provider.charges(datetime.now(UTC) - timedelta(hours=1))
            ends = {charge.kind: charge.end for charge in charges}
            return (ends["disk"] - ends["gpu"]).total_seconds() if "gpu" in ends else 0.0

        await until(lead, lambda seconds: seconds > 0.2, "the end of GPU billing")

    async def process_of(self, instance_id: str | None) -> psutil.Process:
        """The leader of an instance's process group."""
        rows = (await self.state())["instances"]
        pid = next(row["pid"] for row in rows if str(row["id"]) == instance_id)
        assert pid is not None
        return psutil.Process(pid)
