"""The model's files, from the learner's word to the nodes and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from app.protocol.hub import HubRef
from tests.integration.control.rig import Learner, Node_, World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
SHA = "0123456789abcdef0123456789abcdef01234567"
ASSETS = [
    {"path": "config.json", "size": 2, "blake3": "00" * 32},
    {"path": "m.safetensors", "size": 9, "blake3": "11" * 32, "hub": {"repo": "org/m", "revision": SHA}},
]


async def wants(learner: Learner) -> bool:
    """Whether the learner is to put files into the store."""
    answer = await learner.post("heartbeat", {"step": learner.step, "state": "training"})
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    return bool(told["store_model"])


async def test_a_node_is_sent_to_the_hub_and_the_learner_hears_when_that_failed(control: World) -> None:
    job_id = await control.create()
    learner = await control.ready_learner(job_id, assets=ASSETS)
    await control.round()
    await control.round(10)
    node = await control.join(control.provider.live()[0])
    config, weights = node.answer.assets
    assert config.hub is None
    assert weights.hub == HubRef(repo="org/m", revision=SHA)
    assert "/model/m.safetensors" in weights.url, "the store's copy, for later"
    assert not await wants(learner)

    said = {"kind": "hub_failed", "subject": "m.safetensors", "detail": "org/m: it is not public there (HTTP 401)"}
    assert (await node.post("reports", said)).status_code == 204
    [event] = [e for e in await control.events(job_id) if e.kind == "hub_failed"]
    assert "m.safetensors" in event.message
    assert "not public" in event.message
    assert await wants(learner)
    await learner.start()
    await learner.ready(assets=ASSETS)
    assert await wants(learner), "another process has to look after it, too"


async def test_a_node_that_waits_for_the_store_s_copy_is_not_stuck_until_it_is_there(control: World) -> None:
    job_id = await control.create()
    learner = await control.ready_learner(job_id, assets=ASSETS)
    await control.round()
    await control.round(10)
    node = Node_(control, control.provider.live()[0].env["ECHO2_JOIN_TOKEN"])
    await node.join()
    fetching = {"phase": "fetching", "detail": "m.safetensors", "have": 2, "total": 11}

    async def still(rounds: int) -> None:
        for _ in range(rounds):
            await node.beat(state="joining", policy_version=None, start=fetching)
            await learner.beat()
            await control.round(10)

    await node.beat(state="joining", policy_version=None, start=fetching)
    assert (await node.post("reports", {"kind": "hub_failed", "subject": "m.safetensors"})).status_code == 204
    await still(30)
    assert (await control.node_row(node.id)).state == "joining", "more than a phase may stand still"
    await learner.tell("heartbeat", {"step": 0, "state": "waiting", "model_stored": True})
    assert (await control.kinds(job_id)).count("model_stored") == 1
    await still(2)
    assert (await control.node_row(node.id)).state == "lost", "now it could fetch"


async def test_a_floating_revision_is_refused_from_the_learner(control: World) -> None:
    job_id = await control.create()
    await control.round()
    learner = Learner(control, job_id)
    await learner.start()
    body = {
        "resume_step": 0, "parameters": 1, "snapshot_bytes": 1, "train_prompts": 1, "eval_prompts": 1,
        "t_train_prior": 1.0, "manifest_public_key": "ab" * 32,
        "assets": [{**ASSETS[1], "hub": {"repo": "org/m", "revision": "main"}}],
    }  # fmt: skip
    answer = await learner.post("ready", body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/assets/0/hub/revision"


async def test_rented_machines_are_told_of_a_mirror(open_world: OpenWorld) -> None:
    mirror = "https://hf-mirror.example.org"
    async with open_world(agent_hf_endpoint=mirror) as control:
        await control.ready_learner(await control.create())
        await control.round()
        await control.round(10)
        assert control.provider.live()[0].env["ECHO2_HF_ENDPOINT"] == mirror


async def test_a_learner_that_starts_again_is_told_the_commit_that_the_job_began_with(control: World) -> None:
    job_id = await control.create()
    learner = await control.ready_learner(job_id, model_revision=SHA)
    await learner.start()
    assert learner.model_revision == SHA
    await learner.ready(model_revision="f" * 40)
    await learner.start()
    assert learner.model_revision == SHA
    refused = await learner.post("ready", {"model_revision": "main"})
    assert "/model_revision" in [e["pointer"] for e in refused.json()["errors"]]
