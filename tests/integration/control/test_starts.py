"""Machines that start: slow ones are waited for, stuck ones and those that are not what was rented are given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from tests.integration.control.fake_provider import FakeProvider, Rented
from tests.integration.control.rig import URL, FakeClock, Node_, World, machines

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
GIB = 1024**3


async def told(control: World, rented: Rented, phase: str, **more: Any) -> httpx.Response:
    """The machine's script says how far it is."""
    headers = {"Authorization": f"Bearer {rented.env['ECHO2_JOIN_TOKEN']}"}
    return await control.http.post("/v1/nodes/progress", json={"phase": phase, **more}, headers=headers)


async def renting(control: World, provider: FakeProvider) -> tuple[str, Rented]:
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    (rented,) = provider.live()
    return job_id, rented


def facts(*gpu_gib: float, ecc: int | None = 0) -> dict[str, Any]:
    gpus = [{"name": "NVIDIA GeForce RTX 4090", "memory_bytes": round(g * GIB), "ecc_errors": ecc} for g in gpu_gib]
    return {"gpus": gpus, "driver": "560.35", "cpus": 16, "memory_bytes": 64 * GIB, "disk_free_bytes": 10 * GIB}


async def joining(control: World, rented: Rented, facts: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {rented.env['ECHO2_JOIN_TOKEN']}"}
    body = {"agent_version": "1", "engine": "paced", "facts": facts}
    return await control.http.post("/v1/nodes/join", json=body, headers=headers)


async def test_a_slow_machine_that_moves_outlives_the_join_timeout(control: World, provider: FakeProvider) -> None:
    job_id, rented = await renting(control, provider)
    for minute in range(15):
        answer = await told(control, rented, "installing", detail="vllm", have=minute * 10**8, total=15 * 10**8)
        assert answer.status_code == 204
        await control.round(60)
        assert provider.live_machines() == ["m1"]
    (row,) = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"]
    assert row["phase"] == "installing"
    assert row["phase_age"] == 900.0
    assert row["phase_still"] == 60.0
    assert row["phase_detail"] == "installing vllm, 1.40 of 1.50 GB"
    assert await control.join(rented), "the token is still good"


async def test_a_machine_that_is_stuck_is_given_back_before_the_timeout_and_the_reason_names_the_phase(
    control: World, provider: FakeProvider
) -> None:
    job_id, rented = await renting(control, provider)
    await told(control, rented, "installing", detail="torch", have=5)
    await control.rounds(31)
    assert "m1" not in provider.live_machines()
    lease = (await control.leases())[0]
    assert lease.reason.startswith("stuck while installing torch")
    offers = await control.get("/v1/offers", job_id=job_id)
    assert "stuck while installing" in {o["machine_id"]: o["excluded"] for o in offers["items"]}["m1"]


async def test_a_node_that_hangs_in_its_start_is_given_back_though_its_heart_beats(
    control: World, provider: FakeProvider
) -> None:
    _, rented = await renting(control, provider)
    node = await control.join(rented)
    node.state = "joining"
    for _ in range(20):
        control.clock.advance(10)
        await node.post("heartbeat", beat("joining", {"phase": "fetching", "have": 7, "total": 9}))
        await control.round()
    lease = (await control.leases())[0]
    assert lease.reason.startswith("stuck while fetching, 0.00 of 0.00 GB: nothing moved for 190 s")
    assert rented.instance_id not in {r.instance_id for r in provider.live()}


def beat(state: str, start: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"state": state, "policy_version": None, "start": start, **more}


async def test_a_machine_that_only_says_that_it_is_active_is_not_paid_for_ever(
    control: World, provider: FakeProvider
) -> None:
    _, rented = await renting(control, provider)
    await told(control, rented, "active")
    for _ in range(40):
        await control.round(60)
    lease = (await control.leases())[0]
    assert "that it is active, and does not work" in lease.reason
    assert rented.instance_id not in {r.instance_id for r in provider.live()}


@pytest.mark.parametrize("phases", [["active"], ["active", "loading"]])
async def test_a_node_that_only_says_that_it_is_active_is_not_paid_for_ever(
    control: World, provider: FakeProvider, phases: list[str]
) -> None:
    _, rented = await renting(control, provider)
    node = await control.join(rented)
    node.state = "warming"
    for turn in range(80):
        control.clock.advance(45)
        await node.post("heartbeat", beat("warming", {"phase": phases[turn % len(phases)]}))
        await control.round()
        if rented.instance_id not in {r.instance_id for r in provider.live()}:
            break
    assert rented.instance_id not in {r.instance_id for r in provider.live()}


async def test_nobody_is_stuck_while_nobody_listened(control: World, provider: FakeProvider) -> None:
    _, rented = await renting(control, provider)
    await told(control, rented, "installing", have=5)
    await control.stop()
    control.clock.advance(400)
    await control.start()
    await control.round()
    assert provider.live_machines() == ["m1"]


@pytest.mark.parametrize(("call", "body"), [
    ("progress", {"phase": "booting"}), ("join", {"agent_version": "1", "engine": "paced"}),
])  # fmt: skip
async def test_a_stranger_is_turned_away_while_somebody_writes(control: World, call: str, body: dict[str, Any]) -> None:
    """Whoever guesses tokens does not get in the way of those who write."""
    async with control.svc.core.db.write(), asyncio.timeout(20):
        wrong = await control.http.post(f"/v1/nodes/{call}", json=body, headers={"Authorization": "Bearer jt_guess"})
    assert wrong.status_code == 401


async def test_only_who_may_join_may_tell_and_only_until_the_join(control: World, provider: FakeProvider) -> None:
    _, rented = await renting(control, provider)
    wrong = await control.http.post(
        "/v1/nodes/progress", json={"phase": "booting"}, headers={"Authorization": "Bearer jt_guess"}
    )
    assert wrong.status_code == 401
    assert (await told(control, rented, "napping")).status_code == 422
    await control.join(rented)
    assert (await told(control, rented, "booting")).status_code == 410


@pytest.fixture
def rented_provider(clock: FakeClock) -> FakeProvider:
    """A provider whose machines are strangers'."""
    return FakeProvider(clock, machines(0.2, 0.3), name="strangers")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (facts(), "rented 1 × RTX 4090, found none that its driver shows"),
        (facts(11.99), "rented GPUs of 24.0 GB, found one of 12.9 GB"),
    ],
)
async def test_a_machine_that_is_less_than_what_was_rented_is_given_back(
    open_world: OpenWorld, provider: FakeProvider, rented_provider: FakeProvider, found: dict[str, Any], said: str
) -> None:
    provider.machines = []
    async with open_world(others=[rented_provider]) as control:
        job_id, rented = await renting(control, rented_provider)
        answer = await joining(control, rented, found)
        assert answer.status_code == 410
        assert said in answer.json()["detail"]
        await control.round(10)
        assert rented.instance_id not in {r.instance_id for r in rented_provider.live()}
        lease = (await control.leases())[0]
        assert said in lease.reason
        assert "machine_short" in await control.kinds(job_id)
        offers = await control.get("/v1/offers", job_id=job_id)
        assert said in {o["machine_id"]: o["excluded"] for o in offers["items"]}["m1"]


async def test_a_machine_that_is_what_was_rented_joins_and_shows_what_it_has(
    open_world: OpenWorld, provider: FakeProvider, rented_provider: FakeProvider
) -> None:
    provider.machines = []
    async with open_world(others=[rented_provider]) as control:
        job_id, rented = await renting(control, rented_provider)
        answer = await joining(control, rented, facts(23.5, ecc=3))
        assert answer.status_code == 200
        assert answer.json()["parameters"] == 8_000_000_000
        assert answer.json()["snapshot_bytes"] == 1000
        (row,) = (await control.get(f"/v1/jobs/{job_id}/fleet"))["nodes"]
        assert row["facts"]["gpus"][0]["name"] == "NVIDIA GeForce RTX 4090"
        (worn,) = [e for e in await control.events(job_id) if e.kind == "gpu_errors"]
        assert "GPU 0: 3 uncorrected memory errors" in worn.message


async def test_a_machine_that_says_it_is_unfit_is_left_alone_for_an_hour(
    control: World, provider: FakeProvider
) -> None:
    job_id, rented = await renting(control, provider)
    node = Node_(control, rented.env["ECHO2_JOIN_TOKEN"])
    await node.join()
    why = "disk: needs 12.3 GB, has 4.1 GB free at /workspace"
    assert (await node.post("leave", {"reason": why, "unfit": True})).status_code == 204
    await control.rounds(3)
    assert provider.live_machines() == ["m2"]
    assert why in (await control.leases())[0].reason
    assert "node_unfit" in await control.kinds(job_id)
    control.clock.advance(1800)
    offers = await control.get("/v1/offers", job_id=job_id)
    assert why in {o["machine_id"]: o["excluded"] for o in offers["items"]}["m1"]


async def test_a_machine_has_the_user_s_environment_besides_the_service_s(open_world: OpenWorld) -> None:
    async with open_world(agent_env={"ECHO2_VLLM_ON_SWAP": "resubmit"}) as control:
        _, rented = await renting(control, control.provider)
        assert rented.env["ECHO2_VLLM_ON_SWAP"] == "resubmit"
        assert rented.env["ECHO2_CONTROL_URL"] == URL
        assert rented.env["ECHO2_JOIN_TOKEN"]
