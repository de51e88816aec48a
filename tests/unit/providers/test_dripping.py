"""Answers that come drop by drop: each byte is in time, the whole never is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import httpx
import pytest

from providers.base import Billing, Offer, Provider, RentSpec, Transient
from providers.runpod import RunPod
from providers.vastai import VastAI

SPEC = RentSpec("echo2:f:l:1", "image", "true", {}, 20.0)


class Drops(httpx.AsyncByteStream):
    """One space at a time, for ever."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Never ends."""
        while True:
            await asyncio.sleep(0.005)
            yield b" "


def drip(request: httpx.Request) -> httpx.Response:
    """To whatever is asked."""
    return httpx.Response(200, stream=Drops())


def vastai() -> tuple[Provider, str]:
    """vast.ai without intervals."""
    return VastAI(api_key="key", transport=httpx.MockTransport(drip), interval_scale=0.0), "7"


def runpod() -> tuple[Provider, str]:
    """RunPod."""
    return RunPod(api_key="key", transport=httpx.MockTransport(drip)), "SECURE/1//NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize("make", [vastai, runpod])
async def test_no_call_waits_for_ever_and_a_create_stays_unknown(
    make: Callable[[], tuple[Provider, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("vastai", "runpod"):
        monkeypatch.setattr(f"providers.{module}.client.WHOLE_S", 0.05)
    provider, offer_id = make()
    offer = Offer(
        provider.name, offer_id, "m", "RTX 4090", 1, 24_000, Billing.ON_DEMAND, 1, 0, 0, 0, 0.0, 0.0, 1.0, "", None,
        0.0, 0, datetime.now(UTC),
    )  # fmt: skip
    async with asyncio.timeout(5):
        with pytest.raises(Transient):
            await provider.list()
        result = await provider.rent(offer, SPEC)
        assert result.outcome == "unknown", "it may have been made"
        await provider.aclose()
