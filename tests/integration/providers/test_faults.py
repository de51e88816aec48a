"""What goes wrong between us and the provider, over real connections."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from providers import base
from providers.base import Billing, OfferQuery, Phase, RentSpec
from providers.marketplace import MarketConfig, MarketServer
from providers.vastai import VastAI

from .rig import KEY, Rig, until


@pytest.mark.parametrize("kind", ["drop_after_process", "500_after_process"])
async def test_a_lost_create_answer_is_one_put_and_is_found_by_its_label(rig: Rig, kind: str) -> None:
    await rig.fault("create", kind)
    result = await rig.rent("sleep 600", label="echo2:f:lost:1")
    assert (result.outcome, result.instance_id) == ("unknown", None)
    assert (await rig.seen())["creates_by_label"] == {"echo2:f:lost:1": 1}
    listing = await rig.provider.list()
    assert listing.complete
    assert [i.label for i in listing.instances] == ["echo2:f:lost:1"]
    await rig.phase(listing.instances[0].instance_id, Phase.RUNNING)


@pytest.mark.parametrize("kind", ["drop_before", "500", "502_html"])
async def test_a_create_that_never_arrived_is_unknown_too_and_proved_absent(rig: Rig, kind: str) -> None:
    await rig.fault("create", kind)
    result = await rig.rent("sleep 600")
    assert result.outcome == "unknown"
    assert (await rig.seen())["calls"]["create"] == 1
    listing = await rig.provider.list()
    assert (listing.complete, listing.instances) == (True, ())


async def test_success_false_with_an_id_is_doomed(rig: Rig) -> None:
    await rig.fault("create", "success_false_with_id")
    result = await rig.rent("sleep 600")
    assert (result.outcome, result.instance_id) == ("refused", None)
    assert result.doomed_id is not None
    await rig.provider.release(result.doomed_id)
    assert await rig.provider.get(result.doomed_id) is None


async def test_a_rate_limit_is_a_refusal_with_its_wait(rig: Rig) -> None:
    await rig.fault("create", "429")
    result = await rig.rent("sleep 600")
    assert result.outcome == "refused"
    assert isinstance(result.error, base.RateLimited)
    assert result.error.wait_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("auth_error", base.AuthError),
        ("429", base.RateLimited),
        ("500", base.Transient),
        ("502_html", base.Transient),
        ("drop_before", base.Transient),
    ],
)
async def test_a_destroy_that_failed_is_not_a_destroy(rig: Rig, kind: str, error: type[Exception]) -> None:
    made = await rig.rent("sleep 600")
    assert made.instance_id is not None
    await rig.fault("destroy", kind)
    with pytest.raises(error):
        await rig.provider.release(made.instance_id)
    assert await rig.provider.get(made.instance_id) is not None
    await rig.provider.release(made.instance_id)
    assert await rig.provider.get(made.instance_id) is None


async def test_a_destroy_whose_answer_is_lost_is_settled_by_the_next(rig: Rig) -> None:
    made = await rig.rent("sleep 600")
    assert made.instance_id is not None
    await rig.fault("destroy", "drop_after_process")
    with pytest.raises(base.Transient):
        await rig.provider.release(made.instance_id)
    await rig.provider.release(made.instance_id)
    assert await rig.provider.get(made.instance_id) is None


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("list_410", base.EndpointDeprecated),
        ("auth_error", base.AuthError),
        ("429", base.RateLimited),
        ("502_html", base.Transient),
        ("drop_after_process", base.Transient),
    ],
)
async def test_a_list_that_failed_is_no_empty_list(rig: Rig, kind: str, error: type[Exception]) -> None:
    await rig.rent("sleep 600")
    await rig.fault("list", kind)
    with pytest.raises(error):
        await rig.provider.list()
    assert len((await rig.provider.list()).instances) == 1


async def test_a_truncated_list_is_not_complete(rig: Rig) -> None:
    await rig.rent("sleep 600")
    await rig.fault("list", "list_truncated")
    assert not (await rig.provider.list()).complete
    assert (await rig.provider.list()).complete


async def test_a_machine_that_never_starts_fails_at_once(rig: Rig) -> None:
    await rig.fault("create", "never_starts")
    first = await rig.offer()
    made = await rig.rent("sleep 600")
    instance = await rig.phase(made.instance_id, Phase.FAILED)
    assert instance.raw_status == "created"
    assert "unsatisfied condition" in instance.detail
    assert (await rig.offer()).machine_id != first.machine_id
    await rig.provider.release(instance.instance_id)
    await until(rig.offer, lambda offer: offer.machine_id == first.machine_id, "the machine's return to the market")


async def test_faults_can_be_taken_back_and_count(rig: Rig) -> None:
    await rig.fault("search", "500", count=2)
    for _ in range(2):
        with pytest.raises(base.Transient):
            await rig.offer()
    await rig.offer()
    await rig.fault("any", "500", count=9)
    await rig.control("DELETE", "faults")
    await rig.offer()
    refused = await rig.http.post("/_market/faults", json={"call": "search", "kind": "list_truncated"})
    assert refused.status_code == 400


async def test_rate_limits_hold_and_the_adapter_keeps_them(tmp_path: Path) -> None:
    config = MarketConfig(tmp_path, KEY, rate_limits=True, rate_scale=0.05, start_delay_s=60)
    async with MarketServer(config) as server:
        hasty = VastAI("marketplace", server.url, KEY, interval_scale=0)
        answers = await asyncio.gather(hasty.list(), hasty.list(), return_exceptions=True)
        (refused,) = [answer for answer in answers if isinstance(answer, BaseException)]
        assert isinstance(refused, base.RateLimited)
        assert refused.wait_s == pytest.approx(0.05)
        await hasty.list()  # it waited as it was told
        polite = VastAI("marketplace", server.url, KEY, interval_scale=0.06)
        offers = await polite.search(OfferQuery(Billing.ON_DEMAND))
        for offer in offers[:3]:
            assert (await polite.rent(replace(offer), RentSpec("L", "i", "", {}, 10.0))).outcome == "created"
        await hasty.aclose()
        await polite.aclose()
