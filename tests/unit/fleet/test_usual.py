"""A price that swings is no saving: what counts for a swap is what a machine costs now and has cost for a while."""

from __future__ import annotations

import math

import pytest

from app.fleet.activation import Candidate, Policy, Running, decide
from app.fleet.market import USUAL_S, average
from bench.price_wave import run

OLD_S = 100_000.0


def running(price: int, usual: int | None = None) -> Running:
    return Running(Candidate("lease", "a", price, 1.0, usual), ready=True, age_s=OLD_S)


@pytest.mark.parametrize(
    ("offer", "usual", "swapped"),
    [(60, None, True), (60, 60, True), (60, 100, False), (120, 60, False), (60, 84, True), (60, 86, False)],
)
def test_a_dip_of_the_moment_is_not_followed(offer: int, usual: int | None, swapped: bool) -> None:
    market = [Candidate("offer", "b", offer * 1000, 1.0, None if usual is None else usual * 1000)]
    assert bool(decide([running(100_000)], market, 1.0, 4, Policy()).retire) is swapped


def test_a_peak_of_the_moment_is_not_fled_from() -> None:
    market = [Candidate("offer", "b", 90_000, 1.0)]
    assert decide([running(140_000)], market, 1.0, 4, Policy()).retire
    assert not decide([running(140_000, 100_000)], market, 1.0, 4, Policy()).retire


def test_the_average_forgets_over_an_hour_and_swings_little() -> None:
    usual = average(None, 100, 0.0)
    assert (usual.micros_h, usual.since, usual.at) == (100.0, 0.0, 0.0)
    assert average(usual, 200, USUAL_S).micros_h == pytest.approx(200 - 100 / math.e)
    swings = []
    for tick in range(2000):
        now = tick * 10.0
        usual = average(usual, round(100_000 * (1 + 0.4 * math.sin(2 * math.pi * now / 1800))), now)
        swings.append(usual.micros_h)
    late = swings[1500:]
    assert max(late) / min(late) < 1.1
    assert average(usual, 5, usual.at - 100).micros_h == usual.micros_h, "a clock that runs backwards changes nothing"


def test_following_a_wave_costs_less_than_staying_and_moves_few() -> None:
    figures = run(1, 6 * 3600.0)
    for market in ("", "bid_"):
        assert figures[market + "vs_never_swapping_max"] < 1
        assert figures[market + "swaps_per_node_2h_max"] <= 1
        assert figures[market + "short_s"] == 0
    assert figures["bid_raises_per_node_2h_mean"] > 1, "bids follow their floors instead"
