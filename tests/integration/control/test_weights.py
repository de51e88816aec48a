"""Engines of one kind that say different things of the same version."""

from __future__ import annotations

from tests.integration.control.rig import World


async def test_an_engine_that_stands_against_two_others_is_named(control: World) -> None:
    job_id = await control.create(stop={"steps": 500})
    _, nodes = await control.running(job_id, 3)
    for node, digest in zip(nodes, "aba", strict=True):
        said = {"version": 0, "engine": "vllm 0.32.0, bfloat16, H200", "digest": digest * 64}
        for _ in range(3):
            await node.beat(weights=said)
    told = [event for event in await control.events(job_id) if event.kind == "weights_differ"]
    assert [event.data["odd"] for event in told] == [[], [nodes[1].id]], "two don't know which of them is wrong"
    assert nodes[1].id in told[1].message
    assert (await control.node_row(nodes[1].id)).quarantined_at is None
