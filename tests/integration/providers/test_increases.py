"""Price increases that hosts announce, through vast.ai's API."""

from __future__ import annotations

import pytest

from providers.base import Announcing, BadRequest, MalformedAnswer, Phase
from providers.vastai import parse

from .rig import Rig


async def test_an_increase_is_shown_and_holds_once_it_is_accepted(rig: Rig) -> None:
    provider = rig.provider
    assert isinstance(provider, Announcing)
    assert await provider.price_increases() == []
    made = await rig.rent("sleep 600")
    before = await rig.phase(made.instance_id, Phase.RUNNING)
    for wish in ("0.912345", "0.923457"):
        await rig.control("POST", f"machines/{before.machine_id}/increase", {"dph_base": wish})
    (one,) = await provider.price_increases()
    assert (one.instance_id, one.compute_micros_h) == (made.instance_id, 923_457), "the newer takes the older's place"
    assert (await rig.phase(made.instance_id, Phase.RUNNING)).compute_micros_h == before.compute_micros_h
    await provider.accept_increase(one.increase_id)
    assert (await rig.phase(made.instance_id, Phase.RUNNING)).compute_micros_h == 923_457
    assert await provider.price_increases() == []
    with pytest.raises(BadRequest, match="waits"):
        await provider.accept_increase(one.increase_id)


async def test_an_increase_that_is_rejected_changes_nothing(rig: Rig) -> None:
    made = await rig.rent("sleep 600")
    before = await rig.phase(made.instance_id, Phase.RUNNING)
    await rig.control("POST", f"machines/{before.machine_id}/increase", {"dph_base": "1.5"})
    (one,) = await rig.provider.price_increases()
    path, body = "/api/v0/instances/reject-price-increase/", {"pending_price_increase_id": int(one.increase_id)}
    assert (await rig.http.put(path, json={**body, "more": 1})).status_code == 400, "vast.ai takes exactly one field"
    assert (await rig.http.put(path, json=body)).status_code == 200
    assert (await rig.http.put(path, json=body)).json()["error"] == "no_pending_price_increase"
    assert await rig.provider.price_increases() == []
    assert (await rig.phase(made.instance_id, Phase.RUNNING)).compute_micros_h == before.compute_micros_h


async def test_an_instance_shows_its_floor_and_its_end(rig: Rig) -> None:
    bid = await rig.phase((await rig.rent("sleep 600", bid=400_000)).instance_id, Phase.RUNNING)
    assert bid.floor_micros_h is not None
    assert 0 < bid.floor_micros_h <= 400_000
    fixed = await rig.phase((await rig.rent("sleep 600")).instance_id, Phase.RUNNING)
    assert fixed.floor_micros_h is None
    assert fixed.ends_at is not None
    assert fixed.started_at is not None
    assert fixed.ends_at > fixed.started_at


def test_increases_that_can_not_be_read_raise() -> None:
    row = {"pending_price_increase_id": 1, "contract_id": 2, "new_gpu_costpersec": 0.0001}
    (one,) = parse.increases([row, {**row, "new_gpu_costpersec": None}], "vastai")
    assert (one.instance_id, one.increase_id, one.compute_micros_h) == ("2", "1", 360_000)
    for spoilt in ("x", {**row, "contract_id": None}, {**row, "new_gpu_costpersec": "dear"}):
        with pytest.raises(MalformedAnswer):
            parse.increases([spoilt], "vastai")
