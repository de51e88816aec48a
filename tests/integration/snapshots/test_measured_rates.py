"""What relays and pullers measure of real sockets, the kernel holding them to a rate."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import torch

from app.snapshots import SnapshotStore, Source, public_hex
from app.snapshots.pacer import PACKETS
from tests.integration.snapshots.helpers import KEY, Node, relay_of, running, url

MB = 1_000_000
LINK = 8 * MB
"""Bytes per second."""


def roomy(root: Path) -> SnapshotStore:
    return SnapshotStore(root, job_id="j", public_key=public_hex(KEY))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel paces sockets on Linux only")
async def test_a_held_up_relay_finds_its_limit_and_a_starved_one_only_a_lower_bound(tmp_path: Path) -> None:
    """learner, a link of 8 MB/s → a, no limit → b."""
    learner = roomy(tmp_path / "learner")
    async with httpx.AsyncClient() as client, AsyncExitStack() as stack:
        head = await stack.enter_async_context(relay_of(learner, LINK))
        a = Node(tmp_path / "a", [Source("learner", url(head))], client)
        middle = await stack.enter_async_context(relay_of(a.store))
        b = Node(tmp_path / "b", [Source("peer", url(middle), "a")], client)
        await stack.enter_async_context(running(a, b))
        weights = torch.zeros(16 * MB, dtype=torch.bfloat16)
        sent = learner.publish_full({"w": weights}, version=0, key=KEY)
        assert sent.manifest.payload_bytes > 4 * LINK * 0.9
        await b.has(0)
        found = head.meter.rate
        assert found is not None
        assert found.limited
        assert found.bytes_per_s == pytest.approx(LINK / PACKETS, rel=0.1)
        for node, kind in ((a, "learner"), (b, "peer")):
            came = node.puller.meters[kind].rate
            assert came is not None
            assert not came.limited
            assert came.bytes_per_s == pytest.approx(LINK / PACKETS, rel=0.2)
        assert middle.meter.rate is None or not middle.meter.rate.limited


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel paces sockets on Linux only")
async def test_a_forwarder_that_falls_behind_finds_its_own_limit(tmp_path: Path) -> None:
    """learner, no limit → a, a link of 8 MB/s → b."""
    learner = roomy(tmp_path / "learner")
    async with httpx.AsyncClient() as client, AsyncExitStack() as stack:
        head = await stack.enter_async_context(relay_of(learner))
        a = Node(tmp_path / "a", [Source("learner", url(head))], client)
        middle = await stack.enter_async_context(relay_of(a.store, LINK))
        b = Node(tmp_path / "b", [Source("peer", url(middle), "a")], client)
        await stack.enter_async_context(running(a, b))
        learner.publish_full({"w": torch.zeros(16 * MB, dtype=torch.bfloat16)}, version=0, key=KEY)
        await b.has(0)
        found = middle.meter.rate
        assert found is not None
        assert found.limited
        assert found.bytes_per_s == pytest.approx(LINK / PACKETS, rel=0.1)
