"""Interruptible machines: bids against a floor that moves, and hosts that die."""

from __future__ import annotations

import psutil

from providers.base import BidTooLow, Billing, Phase

from .rig import Rig, until


async def test_a_bid_too_low_leaves_an_instance_that_is_handed_over_as_doomed(rig: Rig) -> None:
    result = await rig.rent("sleep 600", bid=100_000)
    assert result.outcome == "refused"
    assert isinstance(result.error, BidTooLow)
    assert result.doomed_id is not None
    instance = await rig.phase(result.doomed_id, Phase.PAUSED)
    assert instance.detail == "outbid"
    await rig.provider.release(result.doomed_id)
    assert (await rig.provider.list()).instances == ()


async def test_outbid_stops_the_process_and_a_lower_floor_brings_it_back(rig: Rig) -> None:
    made = await rig.rent("echo run; sleep 600", bid=200_000)
    instance = await rig.phase(made.instance_id, Phase.RUNNING)
    assert (instance.billing, instance.compute_micros_h) == (Billing.SPOT_BID, 200_000)
    process = await rig.process_of(made.instance_id)
    machine = {"machine_id": int(instance.machine_id)}
    await rig.control("POST", "price", {"selector": machine, "min_bid": "0.200001"})
    outbid = await rig.phase(made.instance_id, Phase.PAUSED)
    assert outbid.detail.startswith("outbid")
    await rig.quiet()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    await rig.gpu_bill_stands_still()
    await rig.control("POST", "price", {"selector": machine, "min_bid": "0.2"})
    await rig.phase(made.instance_id, Phase.RUNNING)
    assert (await rig.log(made.instance_id, "run\nrun")).count("run") == 2


async def test_raising_the_bid_wins_again(rig: Rig) -> None:
    made = await rig.rent("sleep 600", bid=200_000)
    await rig.phase(made.instance_id, Phase.RUNNING)
    await rig.control("POST", "price", {"selector": {"gpu_name": "RTX 4090"}, "factor": 3})
    await rig.phase(made.instance_id, Phase.PAUSED)
    assert made.instance_id is not None
    await rig.provider.set_bid(made.instance_id, 900_000)
    instance = await rig.phase(made.instance_id, Phase.RUNNING)
    assert instance.compute_micros_h == 900_000


async def test_outbid_while_loading_is_seen_as_such(rig: Rig) -> None:
    await rig.fault("create", "outbid_loading")
    made = await rig.rent("sleep 600", bid=200_000)
    instance = await rig.phase(made.instance_id, Phase.PAUSED)
    assert "outbid" in instance.detail


async def test_a_price_change_does_not_touch_a_running_contract(rig: Rig) -> None:
    made = await rig.rent("sleep 600")
    before = await rig.phase(made.instance_id, Phase.RUNNING)
    await rig.control("POST", "price", {"selector": {"gpu_name": "RTX 4090"}, "factor": 2})
    after = await rig.phase(made.instance_id, Phase.RUNNING)
    assert before.compute_micros_h == after.compute_micros_h == 260_000
    assert (await rig.offer()).compute_micros_h == 580_000


async def test_a_dead_host_is_unknown_and_its_process_is_gone(rig: Rig) -> None:
    made = await rig.rent("trap '' TERM; while :; do sleep 1; done")
    instance = await rig.phase(made.instance_id, Phase.RUNNING)
    process = await rig.process_of(made.instance_id)
    await rig.control("POST", f"machines/{instance.machine_id}/kill")
    assert (await rig.phase(made.instance_id, Phase.UNKNOWN)).raw_status == "offline"
    await rig.quiet()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert made.instance_id is not None
    await rig.provider.release(made.instance_id)
    await until(rig.provider.list, lambda x: not x.instances, "an empty list")
    await rig.control("POST", f"machines/{instance.machine_id}/revive")
    assert (await rig.offer()).machine_id == instance.machine_id
