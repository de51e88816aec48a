"""Measured links: what nodes and the learner tell moves places, chains and the plan, and the API shows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from sqlalchemy import select

from app.storage.models import Job
from tests.integration.control.rig import Learner, Node_, World

Open = Callable[..., AbstractAsyncContextManager[World]]
PAYLOAD = 1448 / 1500 * 1e6 / 8
"""Payload bytes per second of one Mbit/s."""


async def tell(node: Node_, **fields: Any) -> None:
    answer = await node.post(
        "heartbeat", {"state": "active", "policy_version": node.version, "rollouts_per_s": 10.0, **fields}
    )
    assert answer.status_code == 200, answer.text


async def rows(control: World, job_id: str) -> dict[str, dict[str, Any]]:
    fleet = await control.get(f"/v1/jobs/{job_id}/fleet")
    return {row["id"]: row for row in fleet["nodes"]}


def in_order(shown: dict[str, dict[str, Any]]) -> list[str]:
    return sorted(shown, key=lambda name: (shown[name]["chain"], shown[name]["chain_position"]))


async def one_chain(control: World) -> tuple[str, dict[str, Node_], list[str]]:
    """A job whose three nodes stand in one chain; the chain, head first."""
    job_id = await control.create()
    _, nodes = await control.running(job_id, nodes=3)
    by_id = {node.id: node for node in nodes}
    chain = in_order(await rows(control, job_id))
    assert len(chain) == 3
    await look(by_id, chain)
    return job_id, by_id, chain


async def look(nodes: dict[str, Node_], chain: list[str]) -> None:
    """Every node tells where it pulls from."""
    for name, upstream in zip(chain, ["learner", *chain], strict=False):
        await tell(nodes[name], upstream=upstream)


async def test_a_node_that_sends_slowly_goes_to_the_end_of_its_chain(open_world: Open) -> None:
    async with open_world(learner_uplink_mbps=500) as control:
        job_id, nodes, chain = await one_chain(control)
        head, middle, last = chain
        await tell(nodes[head], upstream="learner", up_bytes_per_s=50 * PAYLOAD, up_limited=True)
        shown = await rows(control, job_id)
        assert in_order(shown) == [middle, last, head]
        assert shown[head]["up_mbps"] == 500.0
        assert shown[head]["up_mbps_measured"] == pytest.approx(50.0)
        assert (shown[head]["down_mbps_measured"], shown[middle]["down_mbps"]) == (None, 500.0)
        assert shown[middle]["down_mbps_measured"] == pytest.approx(50.0), "that much came through"
        await nodes[head].beat()
        assert [u["node_id"] for u in nodes[head].directives["upstreams"]] == [last, middle, "learner", "store"]
        await control.restart()
        assert in_order(await rows(control, job_id)) == [middle, last, head]
        assert (await rows(control, job_id))[head]["up_mbps_measured"] == pytest.approx(50.0)


async def test_a_starved_relay_and_noise_move_nobody(open_world: Open) -> None:
    async with open_world(learner_uplink_mbps=500) as control:
        job_id, nodes, chain = await one_chain(control)
        for factor in (0.1, 0.4, 0.9):
            await tell(
                nodes[chain[0]], upstream="learner", up_bytes_per_s=500 * factor * PAYLOAD, up_limited=False,
                down_bytes_per_s=500 * factor * PAYLOAD, down_source="learner",
            )  # fmt: skip
        for factor in (0.85, 1.15, 0.9, 1.1):
            await tell(nodes[chain[1]], upstream=chain[0], up_bytes_per_s=500 * factor * PAYLOAD, up_limited=True)
        assert in_order(await rows(control, job_id)) == chain


@pytest.mark.parametrize("store", ["s3", "folder"])
async def test_a_node_that_reads_slowly_from_s3_stands_at_the_end(open_world: Open, store: str) -> None:
    async with open_world(learner_uplink_mbps=500) as control:
        job_id, nodes, chain = await one_chain(control)
        core = control.svc.core
        if store == "s3":
            core.settings = core.settings.model_copy(update={"object_store_url": "s3://bucket/prefix"})
        await tell(nodes[chain[0]], upstream="store", down_bytes_per_s=40 * PAYLOAD, down_source="store")
        shown = await rows(control, job_id)
        assert in_order(shown) == ([*chain[1:], chain[0]] if store == "s3" else chain)
        assert shown[chain[0]]["down_mbps_measured"] == pytest.approx(40.0)


async def test_the_learner_s_measured_uplink_decides_the_chains_and_the_prior(open_world: Open) -> None:
    async with open_world(learner_uplink_mbps=1500) as control:
        job_id = await control.create()
        learner = await control.ready_learner(job_id, 3, snapshot_bytes=10**9)
        await control.round()
        await control.round(10)
        nodes = [await control.join(r) for r in control.provider.live() if r.env]
        assert {row["chain"] for row in (await rows(control, job_id)).values()} == {0, 1, 2}
        for node in nodes:
            await tell(node, upstream="learner")
        before = await prior(control, job_id)
        await learner.tell(
            "heartbeat",
            {"step": 0, "state": "waiting", "up_bytes_per_s": 500 * PAYLOAD, "up_limited": True},
        )
        assert {row["chain"] for row in (await rows(control, job_id)).values()} == {0}
        shown = (await control.job(job_id))["learner"]
        assert shown["uplink_mbps"] == pytest.approx(500.0)
        assert shown["uplink_mbps_measured"] == pytest.approx(500.0)
        await control.restart()
        assert (await control.job(job_id))["learner"]["uplink_mbps"] == pytest.approx(500.0)
        assert await prior(control, job_id) == pytest.approx(before, rel=0.01), "one chain of full speed is as fast"
        learner.world = control
        for _ in range(6):  # what it carried earlier speaks for it a while
            await learner.tell(
                "heartbeat",
                {"step": 0, "state": "waiting", "up_bytes_per_s": 100 * PAYLOAD, "up_limited": True},
            )
        assert await prior(control, job_id) > 4 * before


async def prior(control: World, job_id: str) -> float:
    await control.round()
    async with control.svc.core.db.read() as session:
        job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
        assert job.t_bcast is None
        return float(job.capacity["t_bcast"])


async def test_slow_children_do_not_make_the_learner_s_uplink_slow(open_world: Open) -> None:
    async with open_world(learner_uplink_mbps=10_000) as control:
        job_id = await control.create()
        learner, nodes = await control.running(job_id, nodes=2)
        for node in nodes:
            await tell(node, upstream="learner")
        told = {"step": 0, "state": "waiting", "up_bytes_per_s": 950 * PAYLOAD, "up_limited": True}
        await learner.tell("heartbeat", told)
        assert (await control.job(job_id))["learner"]["uplink_mbps"] == 10_000


async def test_a_head_that_receives_slowly_is_told_from_a_slow_learner(open_world: Open) -> None:
    async with open_world(learner_uplink_mbps=500) as control:
        job_id, nodes, chain = await one_chain(control)
        learner = Learner(control, job_id)
        learner.epoch = 1
        told = {"step": 0, "state": "waiting", "up_limited": True}
        await learner.tell("heartbeat", {**told, "up_bytes_per_s": 490 * PAYLOAD})
        head, other, last = chain
        await tell(nodes[head], upstream=other)
        await tell(nodes[other], upstream="learner")
        await learner.tell("heartbeat", {**told, "up_bytes_per_s": 50 * PAYLOAD})
        shown = await rows(control, job_id)
        assert in_order(shown) == [head, last, other]
        assert shown[other]["down_mbps_measured"] == pytest.approx(50)
        assert shown[head]["down_mbps_measured"] == pytest.approx(490)
        assert (await control.job(job_id))["learner"]["uplink_mbps"] == 500


@pytest.mark.parametrize(
    ("service", "job", "kinds"),
    [
        ("chain", "store", {"store"}),
        ("store", "star", {"learner", "store"}),
        ("star", None, {"learner", "store"}),
        ("store", "chain", {"peer", "learner", "store"}),
    ],
)
async def test_a_job_says_how_its_snapshots_travel(
    service: str, job: str | None, kinds: set[str], open_world: Open
) -> None:
    async with open_world(broadcast_transport=service, learner_uplink_mbps=500) as control:
        job_id = await control.create(fleet={"transport": job})
        _, nodes = await control.running(job_id, nodes=2)
        found = set()
        for node in nodes:
            await node.beat()
            found |= {u["kind"] for u in node.directives["upstreams"]}
        assert found == kinds
        assert (await control.job(job_id))["fleet"]["transport"] == job
