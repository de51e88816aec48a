"""What a measurement of a link says, and what it doesn't."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.snapshots.rates import News, Rate, ReceiveMeter, SendMeter, Window, blend, judge

MB = 1_000_000
RATES = st.builds(Rate, st.floats(1, 1e10), st.booleans())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def send(meter: SendMeter, clock: Clock, count: int, held_s: float) -> None:
    with meter.sending(count):
        clock.now += held_s


def starve(meter: SendMeter, clock: Clock, seconds: float) -> None:
    with meter.starving():
        clock.now += seconds


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (Window(10 * MB, 0.9, held_s=0.9), None),  # too short: it may all be in the socket's buffer
        (Window(0, 2.0, held_s=2.0), None),
        (Window(10 * MB, 1.0, held_s=1.0), Rate(10 * MB, True)),
        (Window(10 * MB, 2.0, held_s=1.7), Rate(5 * MB, True)),
        (Window(10 * MB, 2.0, held_s=1.0), Rate(5 * MB, False)),  # the processor held it up as much
        (Window(10 * MB, 2.0, held_s=1.7, starved_s=0.3), Rate(5 * MB, False)),  # nothing to send for a while
        (Window(10 * MB, 2.0, starved_s=2.0), Rate(5 * MB, False)),
        (Window(40 * MB, 4.0, held_s=3.8, starved_s=0.15), Rate(10 * MB, True)),  # for less than 5 % of the time
    ],
)
def test_what_a_window_says(window: Window, says: Rate | None) -> None:
    assert judge(window) == says


@given(st.floats(1, 100), st.integers(1, 10**12), st.floats(0, 1), st.floats(0, 1))
def test_a_starved_window_is_never_a_limit(seconds: float, count: int, held: float, starved: float) -> None:
    found = judge(Window(count, seconds, held * seconds, starved * seconds))
    assert found is not None
    assert not (found.limited and starved > 0.06)
    assert not (found.limited and held < 0.79)


@given(st.lists(RATES, min_size=1, max_size=30))
def test_a_spell_is_between_its_windows(windows: list[Rate]) -> None:
    spell: Rate | None = None
    for window in windows:
        spell = blend(spell, window)
    assert spell is not None
    speeds = [w.bytes_per_s for w in windows]
    assert min(speeds) * (1 - 1e-9) <= spell.bytes_per_s <= max(speeds) * (1 + 1e-9)
    if not any(w.limited for w in windows):
        assert spell == Rate(max(speeds), False)
    if all(w.limited for w in windows):
        assert spell.limited


@pytest.mark.parametrize(
    ("spell", "window", "then"),
    [
        (None, Rate(5, False), Rate(5, False)),
        (Rate(5, False), Rate(8, False), Rate(8, False)),
        (Rate(8, False), Rate(5, False), Rate(8, False)),
        (Rate(9, False), Rate(3, True), Rate(3, True)),  # a limit outweighs whatever was only a lower bound
        (Rate(10, True), Rate(5, False), Rate(10, True)),
        (Rate(10, True), Rate(20, False), Rate(20, False)),  # it has carried more than what seemed to be its limit
    ],
)
def test_a_limit_outweighs_a_lower_bound_until_more_is_seen(spell: Rate | None, window: Rate, then: Rate) -> None:
    assert blend(spell, window) == then


def test_what_fills_the_socket_s_buffer_is_not_counted() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        for _ in range(40):
            send(meter, clock, MB, 0.0)  # the kernel takes 40 MB at once
        for _ in range(13):
            send(meter, clock, MB, 0.1)
        assert meter.rate == Rate(pytest.approx(10 * MB), True)
        assert meter.windows == 1


def test_a_relay_that_is_starved_says_nothing_of_its_uplink() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        send(meter, clock, MB, 0.1)
        for _ in range(20):
            starve(meter, clock, 0.9)
            send(meter, clock, MB, 0.1)
        assert meter.rate is not None
        assert not meter.rate.limited


def test_one_stream_s_starving_counts_for_all_and_two_are_added_up() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream(), meter.stream():
        send(meter, clock, MB, 0.1)
        for _ in range(7):
            with meter.sending(MB), meter.sending(MB):
                clock.now += 0.2
        assert meter.rate == Rate(pytest.approx(10 * MB, rel=0.15), True)
        with meter.starving():
            for _ in range(7):
                send(meter, clock, 4 * MB, 0.2)
        assert meter.rate is not None
        assert not meter.rate.limited
        assert meter.rate.bytes_per_s > 12 * MB


def test_a_relay_that_the_network_no_longer_holds_up_finds_no_limit() -> None:
    """However long it was held up, and was starved, before."""
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        for _ in range(12):
            send(meter, clock, MB, 0.1)
        assert meter.rate == Rate(pytest.approx(10 * MB), True)
        for _ in range(13):
            clock.now += 0.1
            send(meter, clock, 4 * MB, 0.0)
        assert meter.rate is not None
        assert meter.rate.bytes_per_s > 30 * MB
        assert not meter.rate.limited


def test_a_relay_that_is_no_longer_starved_finds_its_limit() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        send(meter, clock, MB, 0.1)
        for _ in range(4):
            starve(meter, clock, 0.9)
            send(meter, clock, MB, 0.1)
        for _ in range(12):
            send(meter, clock, MB, 0.1)
        assert meter.rate == Rate(pytest.approx(10 * MB), True)


def test_two_streams_that_wait_at_once_wait_once_and_one_that_waits_still_counts_so_far() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream(), meter.stream():
        send(meter, clock, MB, 0.1)
        for _ in range(2):  # 0.5 s of each second in two sockets at a time is half of the time, not all of it
            clock.now += 0.5
            with meter.sending(MB):
                clock.now += 0.2
                send(meter, clock, MB, 0.3)
        assert meter.rate is not None
        assert not meter.rate.limited
        windows = meter.windows
        clock.now += 0.9
        with meter.sending(MB):  # has only begun when the other one closes the window
            send(meter, clock, MB, 0.2)
            assert meter.windows == windows + 1
            assert not meter.rate.limited


def test_the_limits_of_one_spell_are_averaged() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        send(meter, clock, MB, 0.1)
        for count in [MB] * 33 + [2 * MB] * 11:
            send(meter, clock, count, 0.1)
    assert meter.rate is not None
    assert meter.rate.limited
    assert 10.5 * MB < meter.rate.bytes_per_s < 19 * MB


def test_a_new_spell_forgets_the_one_before() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        for _ in range(33):
            send(meter, clock, MB, 0.1)
    clock.now += 60
    with meter.stream():
        for _ in range(13):
            send(meter, clock, 4 * MB, 0.1)
    assert meter.rate == Rate(pytest.approx(40 * MB), True)


def test_a_receiver_leaves_out_the_time_in_which_nothing_was_sent() -> None:
    clock = Clock()
    meter = ReceiveMeter(clock)
    for _ in range(8):
        clock.now += 0.1
        meter.got(MB)
    clock.now += 30.0
    for _ in range(13):
        meter.got(MB)
        clock.now += 0.1
    assert meter.rate == Rate(pytest.approx(10 * MB), False)
    assert meter.windows == 1, "the pause is in none"


@pytest.mark.parametrize(("pause", "windows"), [(0.35, 1), (0.45, 0)])
def test_a_pause_of_more_than_the_documented_length_begins_a_new_window(pause: float, windows: int) -> None:
    clock = Clock()
    meter = ReceiveMeter(clock)
    for step in [0.0, *[0.1] * 6, pause, 0.1]:
        clock.now += step
        meter.got(MB)
    assert meter.windows == windows


def test_a_link_on_which_every_leaf_takes_long_is_measured() -> None:
    clock = Clock()
    meter = ReceiveMeter(clock)
    for _ in range(4):
        clock.now += 1.5
        meter.got(MB)
    assert meter.rate == Rate(pytest.approx(MB / 1.5), False)


def test_each_measurement_is_told_once() -> None:
    clock, news = Clock(), News()
    meter = ReceiveMeter(clock)
    assert news.of("peer", None) is None
    assert news.of("peer", meter) is None
    for _ in range(12):
        meter.got(MB)
        clock.now += 0.1
    assert news.of("peer", meter) == meter.rate
    assert news.of("peer", meter) is None
    assert news.of("other", meter) == meter.rate
    for _ in range(12):
        meter.got(2 * MB)
        clock.now += 0.1
    again = news.of("peer", meter)
    assert again is not None
    assert again == meter.rate


def test_a_first_window_that_holds_what_filled_the_buffer_does_not_last() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    with meter.stream():
        send(meter, clock, MB, 0.1)  # a busy machine, not a full buffer
        send(meter, clock, 8 * MB, 0.1)
        for _ in range(23):
            send(meter, clock, MB, 0.1)
    assert meter.rate == Rate(pytest.approx(10 * MB), True)


def test_a_first_window_does_not_last_in_a_later_spell_either() -> None:
    clock = Clock()
    meter = SendMeter(clock)
    for _ in range(2):
        with meter.stream():
            send(meter, clock, MB, 0.1)
            send(meter, clock, 8 * MB, 0.1)
            for _ in range(23):
                send(meter, clock, MB, 0.1)
        assert meter.rate == Rate(pytest.approx(10 * MB), True)
        clock.now += 60
