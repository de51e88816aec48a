"""What providers do to us: unclear answers, machines that vanish, come back, cost something else, are not ours."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from providers.base import RateLimited, Transient
from tests.integration.control.fake_provider import FakeProvider, Outcome, machines_of
from tests.integration.control.rig import World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]


async def test_unknown_outcome_is_adopted_by_label_and_never_rented_again(
    control: World, provider: FakeProvider
) -> None:
    provider.outcomes = deque(["unknown_created"])
    provider.listing_lag_s = 15
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    (lease,) = await control.leases()
    assert lease.state == "unknown"
    await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "unknown"
    await control.round(10)
    (lease,) = await control.leases()
    assert (lease.state, lease.instance_id) == ("booting", "1")
    assert "lease_adopted" in await control.kinds(job_id)
    assert provider.creates.total() == 1
    node = await control.join(provider.live()[0])
    assert (await control.leases())[0].state == "active"
    assert node.directives["shutdown"] is False


async def test_unknown_outcome_that_left_nothing_is_abandoned_after_the_settling_time(
    control: World, provider: FakeProvider
) -> None:
    provider.outcomes = deque(["unknown_nothing"])
    job_id = await control.create()
    await control.ready_learner(job_id)
    for _ in range(9):
        await control.round(9)
        assert [x.state for x in await control.leases()] == ["unknown"]
    assert provider.creates.total() == 1
    await control.round(20)
    await control.round()
    assert [(x.machine_id, x.state) for x in await control.leases()] == [("m1", "refused"), ("m2", "booting")]
    assert all(count == 1 for count in provider.creates.values())


async def test_refused_offer_is_left_for_the_next_one(control: World, provider: FakeProvider) -> None:
    provider.outcomes = deque(["refuse"])
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.round(1)
    assert [(x.machine_id, x.state) for x in await control.leases()] == [("m1", "refused"), ("m2", "booting")]
    assert (await control.get(f"/v1/jobs/{job_id}/cost"))["leases"][0]["machine_id"] == "m2"


async def test_doomed_instance_of_a_refusal_is_destroyed(control: World, provider: FakeProvider) -> None:
    provider.outcomes = deque(["doomed"])
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.round(10)
    await control.round(10)
    await control.round(10)
    doomed = provider.rented["1"]
    assert doomed.gone_at is not None
    assert provider.release_calls["1"] >= 1
    assert {x.instance_id: x.state for x in await control.leases()}["1"] == "released"
    assert provider.live_machines() == ["m2"]


async def test_machine_whose_node_never_joins_is_given_back_and_left_alone(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.round(590)
    assert provider.live_machines() == ["m1"]
    await control.round(20)
    await control.round(10)
    first = (await control.leases())[0]
    assert (first.machine_id, first.state) == ("m1", "released")
    assert "did not join" in first.reason
    assert provider.live_machines() == ["m2"]
    offers = await control.get("/v1/offers", job_id=job_id)
    assert {o["machine_id"]: o["excluded"] for o in offers["items"]}["m1"].startswith("cooling down")


async def test_machine_that_never_starts_is_given_back(control: World, provider: FakeProvider) -> None:
    provider.boot_s = 100_000
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.round(601)
    await control.round(10)
    assert (await control.leases())[0].state == "released"
    assert provider.live_machines() == ["m2"]


@pytest.mark.parametrize("fault", ["pause", "fail"])
async def test_interrupted_machine_is_told_released_and_replaced_elsewhere(
    control: World, provider: FakeProvider, fault: str
) -> None:
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    await control.running(job_id)
    (lost,) = provider.live()
    getattr(provider, fault)(lost.instance_id)
    await control.round(10)
    assert "preempted" in await control.kinds(job_id)
    assert provider.rented[lost.instance_id].gone_at is not None
    assert provider.live_machines() == ["m2"]
    await control.round(10)
    assert (await control.leases())[0].state == "released"
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["preemptions"] == 1


async def test_vanished_machine_is_replaced_after_two_complete_listings(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    items, _ = await node.work(2)
    assert len(items) == 2
    provider.vanish("1")
    await control.round(10)
    assert [x.state for x in await control.leases()] == ["active"]
    assert provider.creates.total() == 1
    await control.round(10)
    first, second = await control.leases()
    assert (first.state, first.reason) == ("released", "vanished from the provider's list")
    assert second.machine_id == "m2"
    assert {i.status for i in await control.items(job_id)} == {"pending"}
    await node.beat()
    assert node.directives["shutdown"]


async def test_incomplete_and_failing_listings_prove_nothing(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, nodes = await control.running(job_id)
    provider.incomplete = True
    await control.rounds(4, 10, *nodes, learner)
    provider.incomplete, provider.list_error = False, RateLimited("slow down", wait_s=60)
    await control.rounds(4, 10, *nodes, learner)
    assert [x.state for x in await control.leases()] == ["active"]
    assert provider.creates.total() == 1
    (known,) = (await control.get("/v1/fleet"))["providers"]
    assert not known["usable"]
    assert "slow down" in known["reason"]
    provider.list_error = None
    await control.rounds(1, 10, *nodes, learner)
    assert (await control.get("/v1/fleet"))["providers"][0]["usable"]


async def test_search_that_fails_rents_nothing_and_is_told(control: World, provider: FakeProvider) -> None:
    provider.search_error = Transient("502")
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await control.round(10)
    assert provider.creates.total() == 0
    assert "no_offers" in await control.kinds(job_id)
    assert (await control.job(job_id))["status_reason"] == (
        "waits for machines: no offer that the job may rent; see /v1/offers for why"
    )
    provider.search_error = None
    await control.round(10)
    assert provider.creates.total() == 1
    assert (await control.job(job_id))["status_reason"] == "renting the first nodes"


async def test_ghost_is_destroyed_again_and_paid_for(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id)
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    for _ in range(6):
        await control.round(10)
    assert [x.state for x in await control.leases()] == ["released"]
    assert (await control.job(job_id))["status"] == "cancelled"
    provider.resurrect("1")
    await control.round(60)
    assert (await control.leases())[0].state == "releasing"
    assert "lease_ghost" in await control.kinds(job_id)
    assert provider.rented["1"].gone_at is not None
    await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "released"
    true = provider.cost()
    assert lease.spent_gpu == int(true["gpu"])
    assert lease.spent_disk == int(true["disk"])


async def test_release_that_is_accepted_and_does_nothing_is_sent_again(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id)
    provider.ghosts = True
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    for _ in range(8):
        await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "releasing"
    assert provider.release_calls["1"] >= 2
    assert (await control.job(job_id))["status"] == "draining"
    provider.ghosts = False
    for _ in range(8):
        await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "released"
    assert lease.spent_gpu == int(provider.cost()["gpu"])


async def test_release_that_fails_is_tried_again_and_counts_only_when_it_is_gone(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id)
    provider.release_failures = 3
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    for _ in range(30):
        await control.round(5)
        (lease,) = await control.leases()
        if provider.rented["1"].gone_at is None:
            assert lease.state != "released"
    assert lease.state == "released"
    assert provider.release_calls["1"] == 4
    assert (await control.kinds(job_id)).count("release_failed") == 3
    assert lease.spent_gpu == int(provider.cost()["gpu"])


async def test_other_peoples_instances_are_never_touched_and_our_orphans_are_destroyed(
    control: World, provider: FakeProvider
) -> None:
    foreign = [provider.add_foreign(label) for label in ("", "training-7", "echo2:other:lease_1:1", "echo2:default2:x")]
    orphan = provider.add_foreign("echo2:default:lease_of_a_lost_database:1")
    for _ in range(4):
        await control.round(60)
    assert all(f.gone_at is None and provider.release_calls[f.instance_id] == 0 for f in foreign)
    assert orphan.gone_at is not None
    assert "orphan_destroyed" in await control.kinds()


async def test_node_without_heartbeats_is_lost_and_its_work_goes_to_others(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, slot = await node.work(3)
    await control.rounds(7, 10, learner)
    assert (await control.node_row(node.id)).state == "lost"
    assert {i.status for i in await control.items(job_id)} == {"pending"}
    assert "node_lost" in await control.kinds(job_id)
    assert provider.live_machines() == ["m2"]
    await control.round(10)
    heir = await control.join(provider.live()[0])
    again, _ = await heir.work(3)
    assert [i.id for i in again] == [i.id for i in items]
    assert slot is not None
    answer = await node.commit(slot, b"x" * 10, [i.id for i in items])
    assert answer.json()["reason"] == "foreign_work_item"


async def test_silence_is_not_held_against_nodes_while_nobody_listened(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    await control.stop()
    control.clock.advance(600)
    await control.start()
    await control.round()
    assert (await control.node_row(node.id)).state == "active"
    await control.round(70)
    assert (await control.node_row(node.id)).state == "lost"


async def test_machine_billed_above_its_quote_is_given_back(control: World, provider: FakeProvider) -> None:
    provider.billed_factor = 1.2
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    provider.billed_factor = 1.0
    await control.round(10)
    await control.round(10)
    first = (await control.leases())[0]
    assert first.state == "released"
    assert "quoted" in first.reason
    assert provider.live_machines() == ["m2"]
    assert first.spent_gpu == int(first.rate_micros_h * 10 / 3600)


async def test_node_that_joins_before_the_create_answer_is_active(control: World, provider: FakeProvider) -> None:
    provider.outcomes = deque(["unknown_created"])
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    node = await control.join(provider.live()[0])
    await control.round(10)
    (lease,) = await control.leases()
    assert lease.state == "active"
    assert (await control.node_row(node.id)).state == "active"


async def test_node_whose_files_are_always_refused_is_given_up(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    for _ in range(20):
        items, slot = await node.work(1)
        assert slot is not None
        await node.put(slot, b"garbage")
        assert (await node.commit(slot, b"garbage", [i.id for i in items])).status_code == 422
    await control.rounds(1, 10, node, learner)
    assert provider.live_machines() == ["m2"]
    assert "refused" in (await control.leases())[0].reason


async def test_machine_lease_is_renewed_while_its_node_works(open_world: OpenWorld, provider: FakeProvider) -> None:
    async with open_world(lease_hours=1, heartbeat_timeout_seconds=7200) as control:
        job_id = await control.create()
        _, (node,) = await control.running(job_id)
        control.clock.advance(1500)
        await node.beat()
        await control.round()
        await node.beat()
        assert node.directives["lease_expires_in_s"] == pytest.approx(2100, abs=60), "more than half is left"
        control.clock.advance(1000)
        await node.beat()
        await control.round()
        await node.beat()
        assert node.directives["lease_expires_in_s"] == pytest.approx(3600)
        assert not node.directives["drain"]
        assert len(provider.live()) == 1


async def test_node_that_joins_but_never_works_is_replaced(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    (rented,) = provider.live()
    node = await control.join(rented)
    node.state, node.version = "warming", None
    for _ in range(62):
        control.clock.advance(10)
        await node.beat()
        await control.round()
    lease = (await control.leases())[0]
    assert "does not work yet" in lease.reason
    assert lease.state in ("releasing", "released")
    assert rented.instance_id not in {r.instance_id for r in provider.live()}


async def test_dear_machine_gives_way_to_a_cheaper_one_without_a_gap(control: World, provider: FakeProvider) -> None:
    provider.machines = machines_of(m1=2.0)
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    provider.machines += machines_of(cheap=0.1)
    # The least life of a lease, and as long again for a second thought.
    await control.rounds(26, 10, node, learner)
    assert provider.live_machines() == ["cheap", "m1"]
    assert not node.directives["drain"]
    heir = await control.join(next(r for r in provider.live() if r.machine.machine_id == "cheap"))
    await control.rounds(2, 1, node, heir, learner)
    assert node.directives["drain"]
    await node.leave()
    await control.rounds(2, 10, heir, learner)
    assert provider.live_machines() == ["cheap"]


OUTCOMES: list[Outcome] = ["created", "unknown_created", "doomed", "refuse"]


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_cancelled_while_renting_leaves_nothing_behind(
    control: World, provider: FakeProvider, outcome: Outcome
) -> None:
    provider.outcomes = deque([outcome])
    provider.listing_lag_s = 15
    job_id = await control.create()
    learner = await control.ready_learner(job_id)
    await control.round()
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    for _ in range(15):
        await control.round(10)
    assert provider.live() == []
    assert (await control.job(job_id))["status"] == "cancelled"


async def test_listing_that_lags_does_not_make_a_failed_release_look_done(
    control: World, provider: FakeProvider
) -> None:
    provider.listing_lag_s = 15
    provider.release_failures = 1
    job_id = await control.create()
    learner = await control.ready_learner(job_id)
    await control.round()
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    await control.round(1)
    assert provider.release_calls["1"] == 1
    await control.round(1)
    assert [x.state for x in await control.leases()] == ["releasing"]
    for _ in range(4):
        await control.round(10)
    assert provider.live() == []
    assert (await control.job(job_id))["status"] == "cancelled"


async def test_decisions_at_the_same_time_fill_a_gap_once(control: World, provider: FakeProvider) -> None:
    offered, provider.machines = provider.machines, []
    job_id = await control.create()
    await control.ready_learner(job_id, nodes=2)
    await control.round()
    provider.machines = offered
    control.clock.advance(10)
    await control.get("/v1/offers", job_id=job_id)
    await asyncio.gather(*(control.svc.controller.decide(job_id, "a price") for _ in range(4)))
    await control.svc.controller.leases.drain_tasks()
    assert provider.creates.total() == 2


async def test_billing_of_a_machine_that_joined_early_is_looked_up_at_the_next_round(
    open_world: OpenWorld, provider: FakeProvider
) -> None:
    async with open_world(reconcile_seconds=3600) as control:
        job_id = await control.create()
        await control.ready_learner(job_id)
        await control.round()
        node = await control.join(provider.live()[0])
        await control.rounds(1, 10, node)
        (lease,) = await control.leases()
        assert (lease.state, lease.gpu_since) == ("active", provider.rented["1"].runs_at)
        seen = provider.listings
        await control.rounds(2, 10, node)
        assert provider.listings == seen
