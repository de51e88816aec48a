"""Nodes that live and do nothing are given back; places for files are as many as there is work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from app.fleet import idle
from app.fleet.idle import DRY_S, NEVER_ASKED_S, QUIET_S
from app.fleet.storewatch import Away
from app.fleet.uploads import EACH, SPARE
from app.protocol.trajectory import encode
from app.protocol.work import UploadSlot
from app.storage.models import Lease
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import Learner, Node_, World

ROUND_S = 150.0
LONG = {"stop": {"steps": 5000}, "learner": {"eval_by": "learner"}, "fleet": {"max_nodes": 1}}
"""A job that goes on; other nodes, which are not here, answer its prompts."""


@pytest.fixture
async def control(open_world: Callable[..., AbstractAsyncContextManager[World]]) -> AsyncIterator[World]:
    """Hearts may beat seldom."""
    async with open_world(heartbeat_timeout_seconds=4 * ROUND_S) as made:
        yield made


async def lazy(control: World) -> tuple[str, Learner, Node_]:
    """A job that goes on, and its one node, which asks for nothing by itself."""
    job_id = await control.create(**LONG)
    learner = await control.ready_learner(job_id)
    await control.round()
    await control.round(10)
    (rented,) = [r for r in control.provider.live() if r.env]
    node = Node_(control, rented.env["ECHO2_JOIN_TOKEN"])
    node.asks = False
    await node.join()
    await node.beat()
    return job_id, learner, node


async def step(node: Node_, learner: Learner, *groups: str) -> None:
    await learner.train(groups)
    await learner.publish(learner.step)
    node.version = learner.step


async def live(control: World, node: Node_, learner: Learner, seconds: float) -> None:
    for _ in range(int(seconds / ROUND_S)):
        await step(node, learner)
        await control.rounds(1, ROUND_S, node, learner)


async def said(control: World, node: Node_) -> tuple[str, str]:
    row = await control.node_row(node.id)
    return row.state, row.reason


async def lease_of(control: World, node: Node_) -> Lease:
    row = await control.node_row(node.id)
    return next(x for x in await control.leases() if x.id == row.lease_id)


@BOTH
async def test_a_node_that_never_asks_for_work_is_given_back(control: World) -> None:
    job_id, learner, node = await lazy(control)
    await live(control, node, learner, NEVER_ASKED_S)
    assert await said(control, node) == ("active", "")
    await live(control, node, learner, 2 * ROUND_S)
    assert (await control.node_row(node.id)).state == "lost"
    lease = await lease_of(control, node)
    assert lease.release_wanted or lease.state in ("releasing", "released")
    assert "asked for no work" in lease.reason
    (event,) = [e for e in await control.events(job_id) if e.kind == "node_idle"]
    assert event.data == {"node": node.id}


async def test_a_node_that_asks_in_vain_is_kept(control: World) -> None:
    """Its version is old, and no newer one comes."""
    job_id, learner, node = await lazy(control)
    for _ in range(4):
        await learner.train([])
    for _ in range(int(2 * DRY_S / ROUND_S)):
        assert (await node.ask())["items"] == []
        await learner.train([])
        await control.rounds(1, ROUND_S, node, learner)
    assert await said(control, node) == ("active", "")
    assert "node_idle" not in await control.kinds(job_id)


@pytest.mark.parametrize("how", ["runs out", "handed back"])
async def test_a_node_that_takes_work_and_hands_nothing_in_is_given_back(control: World, how: str) -> None:
    job_id, learner, node = await lazy(control)
    began = control.clock()
    while (await control.node_row(node.id)).state == "active":
        assert control.clock() - began < DRY_S + 300
        items, _ = await node.work(1)
        if how == "handed back":
            body = {"kind": "handed_back", "detail": "", "work_items": [i.id for i in items]}
            await node.post("reports", body)
        # So seldom that not so many leases have run out in a row as are tolerated.
        await live(control, node, learner, 300)
    assert control.clock() - began >= DRY_S
    assert (await control.kinds(job_id)).count("node_idle") == 1


async def test_an_answer_that_came_too_late_was_work_too(control: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "DRY_S", 600.0)
    _, learner, node = await lazy(control)
    for _ in range(6):
        items, slot = await node.work(1)
        assert slot is not None
        for _ in range(4):
            await learner.train([])
        data = encode(node.rollouts(items))
        await node.put(slot, data)
        assert (await node.commit(slot, data, [items[0].id])).json() == {"accepted": [], "late": [items[0].id]}
        await live(control, node, learner, 300)
    assert await said(control, node) == ("active", "")


async def test_a_store_that_is_away_is_nobodys_fault(control: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner, node = await lazy(control)
    store = control.svc.core.store

    async def nothing() -> None:
        return None

    monkeypatch.setattr(store, "look", nothing)
    store.away = Away("ECHO2_OBJECT_STORE_URL: no answer", control.clock(), True)
    await live(control, node, learner, 2 * QUIET_S)
    assert await said(control, node) == ("active", "")
    store.away = None
    await live(control, node, learner, QUIET_S)
    assert await said(control, node) == ("active", "")
    await live(control, node, learner, ROUND_S)
    assert (await control.node_row(node.id)).state == "lost"


async def test_a_service_that_starts_again_gives_nodes_their_time_anew(control: World) -> None:
    job_id, learner, node = await lazy(control)
    await live(control, node, learner, NEVER_ASKED_S)
    await control.restart()
    control.supervisor.running.add(job_id)
    await live(control, node, learner, QUIET_S)
    assert await said(control, node) == ("active", "")


async def slots(node: Node_, count: int) -> list[Any]:
    return [await node.post("uploads", {"policy_version": node.version}) for _ in range(count)]


async def test_a_node_has_no_more_places_for_files_than_work(control: World) -> None:
    _, _, node = await lazy(control)
    assert {answer.status_code for answer in await slots(node, SPARE)} == {200}
    (refused,) = await slots(node, 1)
    assert refused.status_code == 409
    assert f"has {SPARE} places for files that it has not used" in refused.json()["detail"]
    # Nor any by the way of work.
    answer = await node.ask(1)
    assert (answer["items"], answer["upload"]) == ([], None)
    assert "places for files" in answer["reason"]
    control.clock.advance(601)
    await node.beat()
    items, _ = await node.work(1)
    assert len(items) == 1
    # All at once, too.
    body = {"policy_version": node.version}
    answers = await asyncio.gather(*(node.post("uploads", body) for _ in range(SPARE + EACH + 20)))
    assert [a.status_code for a in answers].count(200) == SPARE + EACH - 1


async def test_who_uses_its_places_has_as_many_as_it_likes(control: World) -> None:
    _, learner, node = await lazy(control)
    for _ in range(SPARE + 8):
        items, _ = await node.work(1)
        (answer,) = await slots(node, 1)
        slot, data = UploadSlot.model_validate(answer.json()), encode(node.rollouts(items))
        await node.put(slot, data)
        assert (await node.commit(slot, data, [items[0].id])).json()["accepted"] == [items[0].id]
        await step(node, learner, items[0].id)


async def test_work_that_is_taken_and_given_back_again_and_again_brings_no_places(control: World) -> None:
    job_id, _, node = await lazy(control)
    (done,), slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts([done]))
    await node.put(slot, data)
    assert (await node.commit(slot, data, [done.id])).json()["accepted"] == [done.id]
    got = 0
    while (await node.ask(1))["items"]:
        got += 1
        assert got <= SPARE + EACH
        held = [i.id for i in await control.items(job_id) if i.status == "leased"]
        # An answer that is told again frees nothing.
        await node.commit(slot, data, [done.id, *held])
        await node.post("reports", {"kind": "handed_back", "detail": "", "work_items": held})
    assert got == SPARE
