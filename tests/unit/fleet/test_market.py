"""Which machines a spot-price selector means, and what a job may rent."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from app.fleet.estimates import Workload
from app.fleet.lives import PRIOR_H
from app.fleet.market import matches
from app.fleet.priced import JobView, Known
from app.fleet.pricing import Traffic, availability
from app.fleet.ranking import price_offer, rank
from app.protocol.job import JobSpec
from providers.base import Billing, Offer
from providers.vastai import VastAI

MACHINE = {"machine_id": "4242", "offer_id": "77", "gpu_name": "RTX 4090", "region": "US"}


@pytest.mark.parametrize(
    ("selector", "same"),
    [
        ({}, True),
        ({"machine_id": 4242}, True),
        ({"machine_id": "4242"}, True),
        ({"machine_id": 424}, False),
        ({"machine_id": None}, True),
        ({"offer_id": 77}, True),
        ({"offer_id": 4242}, False),
        ({"gpu_name": "RTX 4090"}, True),
        ({"gpu_name": "RTX_4090"}, True),
        ({"gpu_name": "RTX 409"}, False),
        ({"gpu_name": "RTX 4090 Ti"}, False),
        ({"instance_type": "RTX 4090"}, True),
        ({"instance_type": "RTX_4090"}, True),
        ({"instance_type": "g5.xlarge"}, False),
        ({"region": "US"}, True),
        ({"zone": "US"}, True),
        ({"region": "EU"}, False),
        ({"machine_id": 4242, "gpu_name": "RTX_4090", "region": "US"}, True),
        ({"machine_id": 4242, "gpu_name": "RTX_4090", "region": "EU"}, False),
        ({"machine_id": 4242, "region": None}, True),
    ],
)
def test_matches(selector: dict[str, Any], same: bool) -> None:
    assert matches(selector, **MACHINE) is same
    underscored = {**MACHINE, "gpu_name": "RTX_4090"}
    assert matches(selector, **underscored) is same, "both spellings of the machine's own GPU"


OFFER = Offer(
    provider="vastai", offer_id="77", machine_id="4242", gpu_name="RTX 4090", num_gpus=1, gpu_ram_mb=24564,
    billing=Billing.SPOT_BID, compute_micros_h=200_000, disk_micros_gb_month=150_000, upload_micros_gb=10_000,
    download_micros_gb=10_000, up_mbps=500.0, down_mbps=500.0, reliability=0.99, region="US", max_duration_s=None,
    dlperf=1.0, ports=5, fetched_at=datetime(2026, 12, 1, tzinfo=UTC),
)  # fmt: skip


def view(**fleet: Any) -> JobView:
    spec = JobSpec.model_validate(
        {"model": "tiny", "task": {"name": "reasoning_gym"}, "budget_usd": "5", "fleet": fleet}
    )
    return JobView(spec, Workload(10**9, 512.0), Traffic(1e9, 1e9))


def test_a_bid_is_priced_above_the_floor_with_every_part() -> None:
    priced = price_offer(OFFER, view())
    assert priced.rate_micros_h == priced.price.compute == 230_000
    assert priced.price.disk == round(150_000 * 16 / 720)
    assert priced.price.traffic == 20_000
    assert priced.price.startup > 0
    assert priced.price.life_h == PRIOR_H[True]
    assert priced.availability == availability(0.99, PRIOR_H[True], 60.0)
    assert priced.mu == pytest.approx(priced.estimate.mu * priced.availability)
    assert priced.rho == pytest.approx(priced.price.total / 1e6 / priced.mu)
    assert priced.excluded == ""


def test_on_demand_is_priced_as_it_is() -> None:
    assert price_offer(replace(OFFER, billing=Billing.ON_DEMAND), view(interruptible=False)).rate_micros_h == 200_000


@pytest.mark.parametrize(
    ("offer", "fleet", "says"),
    [
        (OFFER, {"gpu_names": ["RTX_4090"]}, ""),
        (OFFER, {"gpu_names": ["RTX 409"]}, "gpu_names does not name RTX 4090"),
        (OFFER, {"min_reliability": 0.995}, "min_reliability"),
        (OFFER, {"max_price_per_hour": "0.2"}, ""),  # the bid is cut to the cap
        (OFFER, {"max_price_per_hour": "0.199999"}, "over max_price_per_hour"),
        (replace(OFFER, max_duration_s=600.0), {}, "too soon"),
        (replace(OFFER, max_duration_s=7200.0), {}, ""),
        (replace(OFFER, disk_gb=59.0), {"disk_gb": 60.0}, "its disk of 59 GB is smaller than disk_gb 60"),
        (replace(OFFER, disk_gb=60.0), {"disk_gb": 60.0}, ""),
        (replace(OFFER, gpu_name="B300"), {}, ""),  # an unknown GPU is listed, with a cautious estimate
    ],
)
def test_what_a_job_may_not_rent_has_its_reason(offer: Offer, fleet: dict[str, Any], says: str) -> None:
    priced = price_offer(offer, view(**fleet))
    assert says in priced.excluded
    assert bool(priced.excluded) == bool(says)
    assert priced.mu > 0


def test_the_bid_is_never_above_the_users_cap() -> None:
    assert price_offer(OFFER, view(max_price_per_hour="0.21")).rate_micros_h == 210_000


def test_the_bid_is_never_above_the_machines_on_demand_price() -> None:
    assert price_offer(OFFER, view(), Known(on_demand={0: 215_000})).rate_micros_h == 215_000
    assert price_offer(OFFER, view(), Known(on_demand={0: 900_000})).rate_micros_h == 230_000
    dear = price_offer(OFFER, view(), Known(on_demand={0: 199_999}))
    assert "on-demand price" in dear.excluded
    assert dear.rate_micros_h == 230_000, "what it would take is shown"


def test_a_slow_host_ranks_behind_a_dearer_fast_one() -> None:
    """CASES 17. The same card: 30 % more rent costs less than half an hour of every two spent on downloads."""
    slow = replace(OFFER, offer_id="slow", machine_id="1", down_mbps=128.0)
    fast = replace(OFFER, offer_id="fast", machine_id="2", down_mbps=1000.0, compute_micros_h=220_000)
    light = view()
    heavy = replace(light, model_bytes=16e9, image_bytes={"vastai": 10e9})
    assert [p.offer.offer_id for p in rank([slow, fast], light)] == ["slow", "fast"]
    assert [p.offer.offer_id for p in rank([slow, fast], heavy)] == ["fast", "slow"]


def test_machines_that_pull_no_image_are_not_charged_for_one() -> None:
    elsewhere = replace(view(), image_bytes={"vastai": 10e9})
    assert price_offer(OFFER, elsewhere).price.start_s > price_offer(OFFER, view()).price.start_s
    local = replace(OFFER, provider="marketplace")
    assert price_offer(local, elsewhere).price.total == price_offer(local, view()).price.total


def test_a_host_that_ends_soon_is_scored_down() -> None:
    """CASES 66: the start is paid for a shorter life, and the successor starts earlier."""
    short, long = (price_offer(replace(OFFER, max_duration_s=s), view()) for s in (3600.0, 30 * 86400.0))
    assert short.price.life_h == 1.0
    assert short.rho > long.rho
    assert short.availability < long.availability


def test_many_are_priced_like_one_and_the_excluded_stand_last() -> None:
    offers = [
        replace(OFFER, offer_id=str(i), machine_id=str(i), compute_micros_h=100_000 + 7919 * i % 300_000,
                num_gpus=1 + i % 4, reliability=0.8 + i % 20 / 100, down_mbps=100.0 + 10 * i)
        for i in range(60)
    ]  # fmt: skip
    seen = view()
    ranking = rank(offers, seen, Known(barred={13: "cooling down: why"}))
    for p in ranking:
        if p.offer.offer_id != "13":
            assert p == price_offer(p.offer, seen)
    wanted = [p for p in ranking if not p.excluded]
    assert [p.rho for p in wanted] == sorted(p.rho for p in wanted)
    assert list(ranking.wanted) == wanted == ranking[: len(wanted)]
    assert 0 < len(wanted) < 60
    assert next(p for p in ranking if p.offer.offer_id == "13").excluded == "cooling down: why"


def test_candidates_are_those_that_may_be_paid() -> None:
    offers = [
        replace(OFFER, offer_id=str(i), machine_id=str(i), compute_micros_h=50_000 * (i + 1), reliability=0.9 + i / 100)
        for i in range(9)
    ]
    ranking = rank(offers, view()).wanted
    every = {c.key: c for c in ranking.candidates(9)}
    assert set(every) == {f"vastai:{i}" for i in range(9)}
    assert all(ranking.of(key).price.total == c.price for key, c in every.items())
    assert all(c.start_s == 60.0 for c in every.values())
    limit = sorted(c.price for c in every.values())[4]
    some = ranking.candidates(9, allows=lambda provider, price: price <= limit)
    assert sorted(c.price for c in some) == sorted(c.price for c in every.values())[:5]
    assert ranking.candidates(9, allows=lambda provider, price: False) == []
    assert max(c.mu for c in ranking.candidates(9, most=0.5)) == 0.5


def test_a_bid_is_cut_to_what_the_machine_is_worth() -> None:
    ranking = rank([OFFER], view()).wanted
    (one,) = ranking.candidates(1)
    assert ranking.of(one.key).rate_micros_h == 230_000
    assert ranking.of(one.key, one.price - 10_000).rate_micros_h == 220_000
    assert ranking.of(one.key, 1).rate_micros_h == 200_000, "less than the floor is no bid"


async def test_who_pulls_an_image() -> None:
    """By the provider's own word, not by its name."""
    vast, local = VastAI(), VastAI("marketplace", pulls_image=False)
    assert vast.caps.pulls_image
    assert not local.caps.pulls_image
    await vast.aclose()
    await local.aclose()
