"""A node whose relay can't be had works on as a leaf."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from app.protocol.errors import Unavailable
from app.protocol.node import JoinAnswer
from app.rollout_agent.config import RelayAddress
from app.rollout_agent.relaying import start_relay
from app.snapshots.manifest import new_key
from app.snapshots.relay import Relay
from tests.unit.rollout_agent.tiny import new_store

JOINED = cast(JoinAnswer, SimpleNamespace(relay_token="relay-token", uplink_bytes_per_s=None))


async def started(folder: Path, address: RelayAddress) -> tuple[Relay | None, int]:
    """The relay, and how often it was told that it failed."""
    failures: list[None] = []
    relay = await start_relay(new_store(folder, new_key()), address, JOINED, failed=lambda: failures.append(None))
    return relay, len(failures)


async def test_peers_are_served_where_they_can_reach_the_machine(tmp_path: Path) -> None:
    relay, failures = await started(tmp_path, RelayAddress("127.0.0.1", 0, "http://192.0.2.1:40001"))
    assert relay is not None
    await relay.stop()
    assert failures == 0
    assert await started(tmp_path, RelayAddress("127.0.0.1", 0, None)) == (None, 0), "a leaf is no fault"


@pytest.mark.parametrize("error", [OSError(98, "Address already in use"), Unavailable("its server did not start")])
async def test_a_relay_that_can_t_be_had_ends_nothing(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Relay) -> None:
        raise error

    monkeypatch.setattr(Relay, "start", fail)
    assert await started(tmp_path, RelayAddress("127.0.0.1", 7070, "http://192.0.2.1:40001")) == (None, 1)
    assert "no relay on port 7070" in caplog.text
