"""Pools: offers of which more than one machine may be rented."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet.activation import Candidate, Decision, Policy, Running, decide
from app.fleet.candidates import band
from app.fleet.cover import cheapest_cover
from app.fleet.priced import JobView
from app.fleet.ranking import rank
from providers.base import Billing, Offer
from tests.unit.fleet.test_market import OFFER, view

POOL = replace(
    OFFER, provider="ec2", offer_id="g5.xlarge/us-east-1a", machine_id="g5.xlarge/us-east-1a",
    billing=Billing.SPOT_MARKET, gpu_name="A10G",
)  # fmt: skip
POLICY = Policy()
OLD = 100_000.0


def pooled(**fleet: object) -> JobView:
    return replace(view(**fleet), pools=frozenset({"ec2"}))


def copies(offer: Offer, slots: int = 8) -> list[Candidate]:
    return rank([offer], pooled()).candidates(slots)


def lease_from(offer: Offer, key: str, *, endangered: bool = False) -> Running:
    (one, *_) = copies(offer)
    held = Candidate(key, f"{offer.provider}:{offer.machine_id}", one.price, one.mu)
    return Running(held, True, OLD, endangered)


def test_of_a_pool_as_many_machines_can_be_rented_as_the_job_may_have_and_of_a_machine_one() -> None:
    ranking = rank([POOL, OFFER], pooled())
    candidates = ranking.candidates(3)
    of_pool = [c for c in candidates if c.pool]
    assert len(of_pool) == 3
    assert len({c.key for c in of_pool}) == len({c.machine for c in of_pool}) == 3
    assert {ranking.of(c.key).offer for c in of_pool} == {POOL}
    assert [ranking.of(c.key).offer for c in candidates if not c.pool] == [OFFER]
    assert len(rank([POOL], view()).candidates(3)) == 1, "whoever sells single machines has one of each"


def test_cards_of_several_sizes_in_one_pool_are_rented_side_by_side() -> None:
    """As RunPod names them: one machine id, whatever the number of cards."""
    one = replace(POOL, offer_id="1/A10G", machine_id="A10G")
    two = replace(POOL, offer_id="2/A10G", machine_id="A10G", num_gpus=2, compute_micros_h=390_000)
    ranking = rank([one, two], pooled())
    small, large = (rank([o], pooled())[0].mu for o in (one, two))
    decision = decide([], ranking.candidates(4), large + small, 2, POLICY)
    assert sorted(ranking.of(c.key).offer.num_gpus for c in decision.rent) == [1, 2]


def test_a_pool_fills_what_is_missing_although_machines_of_it_run_already() -> None:
    (one, *_) = copies(POOL)
    running = [lease_from(POOL, "l1"), lease_from(POOL, "l2")]
    decision = decide(running, copies(POOL), one.mu * 5, 8, POLICY)
    assert len(decision.rent) == 3
    assert decide(running, copies(POOL), one.mu * 5, 3, POLICY).rent != decision.rent, "not beyond the slots"
    assert decide(running, copies(POOL), one.mu * 2, 8, POLICY) == Decision(), "and none is swapped for another of it"


def test_nothing_more_is_rented_of_a_pool_that_takes_one_of_ours_away() -> None:
    other = replace(POOL, offer_id="g5.xlarge/us-east-1b", machine_id="g5.xlarge/us-east-1b", compute_micros_h=250_000)
    (one, *_) = copies(POOL)
    running = [lease_from(POOL, "l1", endangered=True), lease_from(POOL, "l2")]
    market = rank([POOL, other], pooled()).candidates(8)
    decision = decide(running, [*market, *copies(other)], one.mu * 3, 8, POLICY)
    assert decision.rent
    assert {c.pool for c in decision.rent} == {"ec2:g5.xlarge/us-east-1b"}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), slots=st.integers(1, 4))
def test_the_band_leaves_nothing_out_that_a_cheapest_set_with_pools_needs(seed: int, count: int, slots: int) -> None:
    rng = random.Random(seed)
    offers = [Candidate(f"o{i}", f"o{i}", rng.randint(1, 60), rng.randint(1, 12) / 4) for i in range(count)]
    pools = np.array([rng.random() < 0.5 for _ in offers])
    kept = band(
        np.array([o.price for o in offers]), np.array([o.mu for o in offers]), [o.machine for o in offers], slots, pools
    )

    def cost(stays: np.ndarray) -> int | None:
        market = [
            replace(o, key=f"{o.key}#{n}", machine=f"{o.machine}#{n}")
            for at, o in enumerate(offers)
            if stays[at]
            for n in range(slots if pools[at] else 1)
        ]
        cover = cheapest_cover(market, need, slots)
        return sum(c.price for c in cover) if sum(c.mu for c in cover) >= need else None

    need = rng.uniform(0.05, 8.0)
    assert cost(kept) == cost(np.ones(count, dtype=bool))


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_a_pool_leaves_dearer_and_slower_offers_out_of_the_choice(slots: int) -> None:
    dearer = [replace(POOL, offer_id=f"dear/{i}", machine_id=f"dear/{i}", compute_micros_h=300_000) for i in range(50)]
    candidates = rank([POOL, *dearer], pooled()).candidates(slots)
    assert {c.pool for c in candidates} == {"ec2:g5.xlarge/us-east-1a"}
    assert len(candidates) == slots
