"""A job that asks for proofs: who may work for it, and what it takes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import numpy as np
import pytest

from app.protocol.proofs import pack, prove
from app.protocol.trajectory import encode
from tests.integration.control.rig import Node_, World, job_body

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
PROOFS = {"trust": {"proofs": "toploc"}}
TWO_TOKENS = pack(prove(2, np.asarray([[3, 4]]), np.asarray([[1, 2]])))


async def join(world: World, token: str, **said: Any) -> httpx.Response:
    body = {"agent_version": "1", "gpu_name": "RTX 4090", "relay_url": None, **said}
    return await world.http.post("/v1/nodes/join", json=body, headers={"Authorization": f"Bearer {token}"})


async def rented(world: World, **changes: Any) -> tuple[str, list[str]]:
    """A job that asks for proofs, and the join tokens of its machines."""
    job_id = await world.create(**PROOFS, **changes)
    await world.ready_learner(job_id, 1)
    await world.round()
    await world.round(10)
    return job_id, [r.env["ECHO2_JOIN_TOKEN"] for r in world.provider.live() if r.env]


async def test_a_node_that_can_not_prove_is_turned_away_and_its_machine_given_back(control: World) -> None:
    job_id, tokens = await rented(control)
    answer = await join(control, tokens[0], engine="vllm")
    assert answer.status_code == 410
    assert "ECHO2_ENGINE=transformers" in answer.json()["detail"]
    assert "machine_short" in await control.kinds(job_id)
    assert "trust.proofs" in (await control.leases())[0].reason


async def test_a_node_that_can_is_told_to_and_only_files_with_proofs_are_taken(control: World) -> None:
    _, tokens = await rented(control)
    answer = await join(control, tokens[0], engine="transformers", proofs="toploc")
    assert answer.status_code == 200, answer.text
    assert answer.json()["proofs"] == "toploc"
    node = Node_(control, tokens[0])
    node.id, node.token = answer.json()["node_id"], answer.json()["node_token"]
    await node.beat()
    for proofs, status in ((None, 422), (TWO_TOKENS[:-2], 422), (TWO_TOKENS, 200)):
        items, slot = await node.work(2)
        assert slot is not None
        data = encode(node.rollouts(items, proofs=proofs))
        await node.put(slot, data)
        found = await node.commit(slot, data, [i.id for i in items])
        assert found.status_code == status, found.text
        assert (status == 200) or found.json()["reason"] == "proofs"


async def test_a_job_without_proofs_takes_none(control: World) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    assert node.answer.proofs == "none"
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items, proofs=TWO_TOKENS))
    await node.put(slot, data)
    assert (await node.commit(slot, data, [i.id for i in items])).json()["reason"] == "proofs"


@pytest.mark.parametrize(("engine", "given"), [("auto", "transformers"), ("transformers", "transformers")])
async def test_machines_are_started_with_an_engine_that_can(open_world: OpenWorld, engine: str, given: str) -> None:
    async with open_world(agent_engine=engine) as control:
        await rented(control)
        assert {r.env["ECHO2_ENGINE"] for r in control.provider.live() if r.env} == {given}


async def test_a_service_whose_nodes_can_not_refuses_the_job(open_world: OpenWorld) -> None:
    async with open_world(agent_engine="vllm") as control:
        headers = {"Authorization": "Bearer ek_admin"}
        answer = await control.http.post("/v1/jobs", json=job_body(**PROOFS), headers=headers)
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["pointer"] == "/trust/proofs"
        assert "ECHO2_AGENT_ENGINE" in answer.json()["errors"][0]["detail"]
        assert (await control.http.post("/v1/jobs", json=job_body(), headers=headers)).status_code == 201
