"""A fresh emulated account of each provider for every scenario."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .harness import Harness, Registered, registered


@pytest.fixture(params=registered(), ids=lambda one: one.name)
async def h(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    one: Registered = request.param
    reason = one.not_applicable.get(request.function.__name__)
    if reason is not None:
        # What a provider does not have; test_registered holds every excuse to a real scenario.
        pytest.skip(f"{one.name}: {reason}")
    async with one.open(tmp_path) as harness:
        yield harness
