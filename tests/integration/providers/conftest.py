"""A marketplace a test, on a free loopback port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from providers.marketplace import MarketConfig, MarketServer
from providers.vastai import VastAI

from .rig import KEY, Rig


@pytest.fixture
def config(tmp_path: Path) -> MarketConfig:
    return MarketConfig(
        tmp_path / "market", KEY, control_enabled=True, start_delay_s=0.05, stop_grace_s=1.0, tick_s=0.02
    )


@pytest.fixture
async def rig(config: MarketConfig) -> AsyncIterator[Rig]:
    async with MarketServer(config) as server:
        provider = VastAI("marketplace", server.url, KEY, interval_scale=0)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=30) as http:
            yield Rig(server, provider, http)
        await provider.aclose()
