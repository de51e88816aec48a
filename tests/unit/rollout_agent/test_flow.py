"""What a node tells of its speed when samples come one by one."""

from __future__ import annotations

import pytest

from app.rollout_agent.engines.base import Load
from app.rollout_agent.flow import MAX_LEASE, MAX_READY, Filling, FlowMeter, most_samples


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


def test_nothing_is_said_of_less_than_a_second() -> None:
    meter = FlowMeter()
    meter.level(0.0, 4, 4)
    meter.finished(0.5, 10)
    assert meter.rates is None
    meter.finished(1.5, 10)
    assert meter.rates is not None
    assert meter.rates.rollouts_per_s == pytest.approx(2 / 1.5, rel=0.02)


def test_an_engine_that_gave_nothing_yet_has_no_speed() -> None:
    meter = FlowMeter()
    meter.level(0.0, 4, 4)
    meter.level(60.0, 4, 4)
    assert (meter.rates, meter.usual_s) == (None, None)


def test_a_pause_is_not_taken_for_the_time_from_one_result_to_the_next() -> None:
    meter = FlowMeter()
    meter.level(0.0, 8, 8)
    for second in (2.0, 4.0):
        meter.finished(second, 10)
    meter.level(4.0, 0, 8)
    meter.level(604.0, 8, 8)
    meter.finished(606.0, 10)
    assert meter.usual_s == pytest.approx(2.0)


def test_work_that_comes_in_between_does_not_shorten_the_time_from_one_result_to_the_next() -> None:
    meter = FlowMeter()
    meter.level(0.0, 8, 8)
    for second in (2.0, 4.0, 6.0):
        meter.level(second - 0.5, 16, 16)
        meter.finished(second, 10)
    assert meter.usual_s == pytest.approx(2.0)


def test_the_time_from_one_result_to_the_next_follows_slowly() -> None:
    meter = FlowMeter()
    meter.level(0.0, 8, 8)
    meter.finished(2.0, 10)
    meter.finished(14.0, 10)
    assert meter.usual_s == pytest.approx(0.9 * 2.0 + 0.1 * 12.0)


def test_busy_time_is_that_of_the_last_half_minute() -> None:
    meter = FlowMeter()
    for second in range(100):  # busy in the first half of each second
        meter.level(second, 4, 64)
        meter.level(second + 0.5, 0, 64)
    assert meter.busy_share(100.0) == pytest.approx(0.5)
    assert meter.busy_share(110.0) == pytest.approx(1 / 3)
    first = FlowMeter()
    first.level(7.0, 4, 64)
    assert first.busy_share(7.0) is None, "no time has passed"


@pytest.mark.parametrize(
    ("size", "in_flight", "ready", "groups"),
    [
        (8, 0, 0, 2),
        (8, 8, 0, 1),
        (8, 9, 0, 0),  # less than a group is free
        (8, 16, 0, 0),
        (8, 40, 0, 0),
        (8, 0, MAX_READY - 1, 2),
        (8, 0, MAX_READY, 0),  # what waits to be handed in comes first
        (2, 0, 0, 8),
        (2, 12, 0, 2),
        (32, 0, 0, 1),  # a group that is larger than where engines begin
        (2000, 0, 0, 1),  # or than they are ever filled
    ],
)
def test_a_new_engine_is_asked_for_as_many_groups_as_fit(size: int, in_flight: int, ready: int, groups: int) -> None:
    assert Filling(size).room(in_flight, ready) == groups


def full(samples: int) -> Load:
    return Load(running=samples, waiting=0, cache_used=0.1, preemptions=0)


def test_an_engine_with_room_gets_more_and_is_asked_for_in_an_eighth_of_it_at_a_time() -> None:
    filling = Filling(4)
    for samples in (16, 32, 64):
        assert filling.samples == samples
        filling.follow(full(samples), samples)
    assert filling.samples == 128
    assert [filling.room(in_flight, 0) for in_flight in (128, 117, 116, 112, 100, 0)] == [0, 0, 0, 4, 7, 32]


def test_no_more_is_leased_at_once_than_one_request_may_ask_for() -> None:
    filling = Filling(1)
    for samples in (16, 32, 64, 128, 256, 512, 1024, 1024):
        assert filling.samples == samples
        filling.follow(full(samples), samples)
    assert filling.room(0, 0) == MAX_LEASE


def test_an_engine_that_is_busy_with_others_requests_alone_says_nothing_of_what_it_takes() -> None:
    filling = Filling(4)
    for _ in range(3):
        filling.follow(Load(running=64, waiting=500, cache_used=0.99, preemptions=9), 0)
    assert filling.samples == 16


@pytest.mark.parametrize(("files", "samples"), [(65_536, 1024), (1280, 1024), (1024, 768), (300, 44), (200, 1)])
def test_no_more_samples_are_in_flight_than_connections_may_be_open(files: int, samples: int) -> None:
    filling = Filling(1, most_samples(files))
    for _ in range(12):
        filling.follow(full(filling.samples), filling.samples)
    assert filling.samples == samples
