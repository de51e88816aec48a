"""Which upstreams nodes are given when the operator says how snapshots travel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.integration.control.rig import World


@pytest.mark.parametrize(("way", "kinds"), [("star", ["learner", "store"]), ("store", ["store"])])
async def test_the_operator_says_how_snapshots_travel(
    way: str, kinds: list[str], open_world: Callable[..., AbstractAsyncContextManager[World]]
) -> None:
    async with open_world(broadcast_transport=way) as control:
        job_id = await control.create()
        _, nodes = await control.running(job_id, nodes=3)
        for node in nodes:
            await node.beat()
            assert [u["kind"] for u in node.directives["upstreams"]] == kinds


async def test_the_cheapest_way_is_taken_once_a_size_is_known(
    open_world: Callable[..., AbstractAsyncContextManager[World]],
) -> None:
    """Peers and the store charge nothing here, so the faster way is the cheaper one: that is a chain, or the store."""
    async with open_world(broadcast_transport="auto", store_egress_micros_gb=1_000_000_000) as control:
        job_id = await control.create()
        _, nodes = await control.running(job_id, nodes=3)
        for node in nodes:
            await node.beat()
            assert "learner" in [u["kind"] for u in node.directives["upstreams"]]
