"""How good and how fast the choice of machines is: against the exact optimum, and against the paper's prefix rule.

200 random markets of 50 to 5000 offers. Half are made of offers as providers show them, priced and ranked as the
service does it; in the other half price and throughput have nothing to do with each other. The optimum is an integer
program (HiGHS by way of scipy); where it is not proven in time, its lower bound counts, which can only make us look
worse. The time is that of pricing, ranking and covering 5000 offers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from app.fleet.activation import Candidate, cheapest_cover, prefix
from app.fleet.estimates import Measurement, Workload, gpu_table
from app.fleet.priced import JobView
from app.fleet.pricing import Traffic
from app.fleet.ranking import rank
from app.protocol.job import JobSpec
from providers.base import Billing, Offer

SEED = 20260
SMALLEST, LARGEST = 50, 5000
TIMED = 25
MIP_SECONDS = 30.0
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Market:
    """What there is, how much of it is needed, and how many machines it may take."""

    candidates: list[Candidate]
    need: float
    slots: int


def job_view() -> JobView:
    """A job over an 8 B model with two measured GPUs."""
    spec = JobSpec.model_validate(
        {"model": "tiny", "task": {"name": "reasoning_gym"}, "budget_usd": "100", "fleet": {"min_reliability": 0.5}}
    )
    load = Workload(parameters=8_000_000_000, tokens_per_rollout=512.0)
    measured = (Measurement("RTX 4090", 3.0, 4.0), Measurement("A100 SXM4", 9.0, 8.0))
    return JobView(spec, load, Traffic(20e9, 25e9), measured, model_bytes=16e9, image_bytes={"bench": 10e9})


def random_offers(rng: random.Random, count: int) -> list[Offer]:
    """Offers of machines with 1…8 GPUs; a machine is offered whole and in slices. Prices follow the card, ±60 %."""
    names = sorted(gpu_table())
    offers: list[Offer] = []
    while len(offers) < count:
        name, machine = rng.choice([*names, "SOMETHING NEW"]), len(offers)
        facts = gpu_table().get(name)
        per_gpu = (facts.memory_gb_s * 180 if facts else 60_000) * rng.lognormvariate(0, 0.5)
        disk, link, reliability = rng.randint(50_000, 300_000), rng.choice((100.0, 500.0, 1000.0)), rng.uniform(0.6, 1)
        for gpus in (1, 2, 4, 8)[: rng.randint(1, 4)]:
            offers.append(
                Offer(
                    provider="bench", offer_id=str(len(offers)), machine_id=str(machine), gpu_name=name, num_gpus=gpus,
                    gpu_ram_mb=24_000, billing=Billing.SPOT_BID, disk_micros_gb_month=disk,
                    compute_micros_h=max(1000, round(per_gpu * gpus * rng.uniform(0.85, 1.05))),
                    upload_micros_gb=rng.randint(0, 30_000), download_micros_gb=rng.randint(0, 30_000),
                    up_mbps=link, down_mbps=link, reliability=reliability, region="XX", max_duration_s=None,
                    dlperf=0.0, ports=10, fetched_at=NOW,
                )
            )  # fmt: skip
    return offers[:count]


def ranked(offers: Sequence[Offer], view: JobView, slots: int) -> list[Candidate]:
    """What the service does with offers: price each, rank them, keep what the job may rent and can be in a cover."""
    return rank(offers, view).wanted.candidates(slots)


def random_candidates(rng: random.Random, count: int) -> list[Candidate]:
    """Prices and throughputs that have nothing to do with each other; a machine is offered up to three times."""
    machines = [str(rng.randrange(max(1, count // 2))) for _ in range(count)]
    return [
        Candidate(str(i), machine, rng.randint(20_000, 4_000_000), rng.uniform(0.2, 40.0))
        for i, machine in enumerate(machines)
    ]


def random_market(rng: random.Random, view: JobView, index: int) -> Market:
    """A market whose need can be met."""
    count = round(SMALLEST * (LARGEST / SMALLEST) ** rng.random())
    candidates = ranked(random_offers(rng, count), view, count) if index % 2 == 0 else random_candidates(rng, count)
    slots = rng.randint(2, 48)
    best: dict[str, float] = {}
    for c in candidates:
        best[c.machine] = max(best.get(c.machine, 0.0), c.mu)
    most = sum(sorted(best.values(), reverse=True)[:slots])
    return Market(candidates, most * rng.uniform(0.02, 0.9), slots)


def cost(chosen: Sequence[Candidate]) -> int:
    """Micro-dollars per hour."""
    return sum(c.price for c in chosen)


def covers(market: Market, chosen: Sequence[Candidate]) -> bool:
    """Whether a set does what is needed within the rules."""
    one_each = len({c.machine for c in chosen}) == len(chosen)
    return one_each and len(chosen) <= market.slots and sum(c.mu for c in chosen) >= market.need * (1 - 1e-9)


def optimum(market: Market) -> float:
    """Cost of the cheapest cover, or a lower bound of it if that is not proven within MIP_SECONDS."""
    items = market.candidates
    scale = cost(items) / len(items)
    rows = {machine: i for i, machine in enumerate(sorted({c.machine for c in items}))}
    ones = np.ones(len(items))
    one_each = coo_array((ones, ([rows[c.machine] for c in items], range(len(items)))), shape=(len(rows), len(items)))
    enough = coo_array(np.array([[c.mu / market.need for c in items]]))
    few = coo_array(ones.reshape(1, -1))
    matrix = vstack([enough, few, one_each]).tocsc()
    lower = np.concatenate([[1.0], np.zeros(1 + len(rows))])
    upper = np.concatenate([[np.inf], [market.slots], np.ones(len(rows))])
    result = milp(
        np.array([c.price / scale for c in items]),
        integrality=ones,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"mip_rel_gap": 1e-6, "time_limit": MIP_SECONDS},
    )
    if result.status == 0:
        return float(cost([c for c, x in zip(items, result.x, strict=True) if x > 0.5]))
    if result.mip_dual_bound is None:
        raise RuntimeError(f"the solver has neither optimum nor bound: {result.message}")
    return float(result.mip_dual_bound) * scale


def timed(rng: random.Random, view: JobView) -> float:
    """p95 of the milliseconds that it takes to price, rank and cover 5000 offers: of this process, which waits for
    nothing, so that others on the machine don't count."""
    times = []
    for _ in range(TIMED):
        offers = random_offers(rng, LARGEST)
        need = sum(c.mu for c in ranked(offers, view, LARGEST)[: rng.randint(4, 16)])
        # What the benchmark itself left behind is not the service's to clean up.
        gc.collect()
        begin = time.process_time()
        cheapest_cover(ranked(offers, view, 32), need, 32)
        times.append((time.process_time() - begin) * 1000)
    return statistics.quantiles(times, n=20)[-1]


def run(markets: int) -> dict[str, float]:
    """All figures."""
    rng, view = random.Random(SEED), job_view()
    against_optimum, against_prefix, worse = [], [], 0
    for index in range(markets):
        market = random_market(rng, view, index)
        chosen = cheapest_cover(market.candidates, market.need, market.slots)
        if not covers(market, chosen):
            raise RuntimeError(f"market {index}: what was chosen does not cover the need")
        against_optimum.append(cost(chosen) / optimum(market))
        simple = prefix(market.candidates, market.need, market.slots)
        if covers(market, simple):
            against_prefix.append(cost(chosen) / cost(simple))
            worse += cost(chosen) > cost(simple)
        if against_optimum[-1] > 1.01:
            print(
                f"market {index}: {len(market.candidates)} offers, {market.slots} slots: "
                f"{against_optimum[-1]:.4f} of the optimum",
                file=sys.stderr,
            )
    return {
        "markets": markets,
        "vs_optimum_mean": round(statistics.mean(against_optimum), 6),
        "vs_optimum_max": round(max(against_optimum), 6),
        "vs_prefix_mean": round(statistics.mean(against_prefix), 6),
        "worse_than_prefix": worse,
        "ms_5000_p95": round(timed(rng, view), 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cost and speed of the choice of machines.")
    parser.add_argument("--markets", type=int, default=200)
    print(json.dumps(run(parser.parse_args().markets)))
