"""What a node tells of its speed when samples come one by one."""

from __future__ import annotations

import pytest

from app.rollout_agent.flow import FlowMeter


def run(meter: FlowMeter, start: float, seconds: float, *, in_flight: int, target: int, per_s: float) -> float:
    """Samples of ten tokens come evenly for a while; returns the end."""
    meter.level(start, in_flight, target)
    for i in range(1, int(seconds * per_s) + 1):
        meter.finished(start + i / per_s, 10)
    meter.level(start + seconds, in_flight, target)
    return start + seconds


def test_a_full_engine_shows_its_speed() -> None:
    assert FlowMeter().rates is None
    meter = FlowMeter()
    run(meter, 100.0, 60.0, in_flight=64, target=64, per_s=8.0)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(8.0, rel=0.02)
    assert meter.rates.tokens_per_s == pytest.approx(80.0, rel=0.02)
    assert meter.usual_s == pytest.approx(1 / 8, rel=0.01)


def test_waiting_for_work_does_not_make_it_look_slow() -> None:
    meter = FlowMeter()
    end = run(meter, 0.0, 60.0, in_flight=64, target=64, per_s=8.0)
    meter.level(end, 0, 64)
    end = run(meter, end + 600, 120.0, in_flight=6, target=64, per_s=1.0)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(8.0, rel=0.02)


def test_three_quarters_full_is_reckoned_up() -> None:
    meter = FlowMeter()
    run(meter, 0.0, 60.0, in_flight=48, target=64, per_s=6.0)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(8.0, rel=0.02)


def test_one_that_never_was_full_is_judged_by_how_far_it_was() -> None:
    meter = FlowMeter()
    run(meter, 0.0, 60.0, in_flight=16, target=64, per_s=2.0)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(8.0, rel=0.02)


def test_a_new_speed_is_soon_what_counts() -> None:
    meter = FlowMeter()
    end = run(meter, 0.0, 300.0, in_flight=64, target=64, per_s=8.0)
    run(meter, end, 90.0, in_flight=64, target=64, per_s=2.0)
    assert meter.rates is not None
    assert 2.0 < meter.rates.rollouts_per_s < 3.0


def test_busy_is_when_anything_is_sampled() -> None:
    meter = FlowMeter()
    assert meter.busy_share(5.0) is None
    meter.level(0.0, 4, 64)
    meter.level(6.0, 0, 64)
    assert meter.busy_share(6.0) == pytest.approx(1.0)
    assert meter.busy_share(12.0) == pytest.approx(0.5)
    assert meter.busy_share(60.0) == pytest.approx(0.0)
    meter.level(60.0, 1, 64)
    assert meter.busy_share(75.0) == pytest.approx(0.5)
