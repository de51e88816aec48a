"""Which machines a spot-price selector means, and what a job may rent."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from app.fleet.estimates import Workload
from app.fleet.market import JobView, matches, price_offer
from app.fleet.pricing import Traffic
from app.protocol.job import JobSpec
from providers.base import Billing, Offer

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
    assert priced.mu == pytest.approx(priced.estimate.mu * 0.99 * 0.97)
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
