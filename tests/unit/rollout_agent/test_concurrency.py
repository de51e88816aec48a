"""The engine is kept full and not overfull, by its own figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rollout_agent.concurrency import BACKLOG, CACHE_FULL, CACHE_HALF, Bounds, Target, first_target, next_target
from app.rollout_agent.engines.base import Load

BOUNDS = Bounds(lowest=8, highest=512, step=8)
EASY = Load(running=64, waiting=0, cache_used=0.3, preemptions=0)


def load(running: int = 64, waiting: int = 0, cache: float = 0.3, preemptions: int = 0) -> Load:
    return Load(running=running, waiting=waiting, cache_used=cache, preemptions=preemptions)


@pytest.mark.parametrize(
    ("target", "in_flight", "figures", "want"),
    [
        # Not full yet: doubled until it is for the first time, then by a group.
        (Target(64), 64, load(), 128),
        (Target(64, met=True), 64, load(), 72),
        (Target(500, met=True), 500, load(running=500), 508),
        (Target(508, met=True), 508, load(running=508), 512),
        # The engine does not know yet of what it was given last.
        (Target(128), 128, load(running=64), 128),
        (Target(128), 128, load(running=110, waiting=2), 128),
        (Target(128), 128, load(running=110, waiting=6), 256),
        # Not used: nothing is learnt about more.
        (Target(64), 48, load(running=48), 64),
        (Target(64), 49, load(running=49), 128),
        (Target(320, met=True), 256, load(running=256), 320),
        (Target(320, met=True), 257, load(running=257), 328),
        (Target(64, met=True), 0, load(running=0), 64),
        # A backlog within bounds keeps it full; a larger one counts when it stays.
        (Target(64, met=True), 64, load(running=56, waiting=8), 72),
        (Target(64, met=True), 64, load(running=48, waiting=16), 64),
        # Then down to what runs and a short queue, at most by a fifth at a time.
        (Target(64, met=True, queued=True), 64, load(running=48, waiting=16), 56),
        (Target(88, met=True, queued=True), 88, load(running=64, waiting=24), 72),
        (Target(640, met=True, queued=True), 640, load(running=512, waiting=128), 512),
        (Target(64, met=True, queued=True), 64, load(running=0, waiting=64), 51),
        (Target(64, met=True, queued=True), 64, load(running=48, waiting=16, cache=0.96), 51),
        (Target(256, met=True, queued=True), 256, load(running=224, waiting=28), 264),
        # The cache is full, or requests were pushed out of it.
        (Target(64, met=True), 64, load(cache=0.96), 51),
        (Target(64, met=True, preemptions=3), 64, load(cache=0.8, preemptions=4), 51),
        (Target(64, met=True, preemptions=4), 64, load(cache=0.8, preemptions=4), 72),
        # A swap puts everything back and empties the cache.
        (Target(64, met=True, preemptions=3), 64, load(cache=0.1, preemptions=67), 72),
        # An engine that was loaded again counts from 0.
        (Target(64, met=True, preemptions=30), 64, load(cache=0.8, preemptions=0), 72),
        # What was decreased just now has not had its effect yet.
        (Target(51, met=True), 64, load(cache=0.99), 51),
        # Less was in flight than there might have been.
        (Target(64, met=True), 40, load(running=40, cache=0.99), 32),
        (Target(8, met=True), 8, load(running=8, cache=0.99), 8),
    ],
)
def test_the_next_target(target: Target, in_flight: int, figures: Load, want: int) -> None:
    assert next_target(target, in_flight, figures, BOUNDS).samples == want


def test_preemptions_before_the_first_look_are_not_ours() -> None:
    target = next_target(Target(64, met=True), 64, load(cache=0.8, preemptions=100), BOUNDS)
    assert target.samples == 72
    assert next_target(target, 72, load(cache=0.8, preemptions=101), BOUNDS).samples < 72


def test_an_engine_that_was_full_while_more_was_in_flight_grows_by_groups_from_then_on() -> None:
    target = next_target(Target(64), 80, load(cache=0.99), BOUNDS)
    assert target.samples == 64
    assert next_target(target, 64, load(), BOUNDS).samples == 72


loads = st.builds(
    Load,
    running=st.integers(0, 1000),
    waiting=st.integers(0, 1000),
    cache_used=st.floats(0, 1),
    preemptions=st.integers(0, 5),
)


@given(st.lists(st.tuples(st.integers(0, 2000), loads), max_size=60))
def test_it_stays_in_bounds_grows_only_when_used_and_shrinks_only_when_full(looks: list[tuple[int, Load]]) -> None:
    target = first_target(BOUNDS)
    for in_flight, figures in looks:
        before, target = target, next_target(target, in_flight, figures, BOUNDS)
        assert BOUNDS.lowest <= target.samples <= BOUNDS.highest
        queued = figures.waiting > max(BOUNDS.step, BACKLOG * figures.running)
        seen = figures.preemptions if before.preemptions is None else before.preemptions
        put_back = figures.preemptions > seen and figures.cache_used > CACHE_HALF
        pressed = figures.cache_used > CACHE_FULL or put_back
        if target.samples > before.samples:
            assert not queued
            assert not pressed
            assert in_flight > before.samples - max(2 * BOUNDS.step, 0.2 * before.samples) - 1e-6
            assert figures.running + figures.waiting >= 0.9 * in_flight
        if target.samples < before.samples:
            assert queued or pressed


class Machine:
    """An engine with so many seats: what is too much waits; `tokens` of cache a seat, of `cache` in all."""

    def __init__(self, seats: int) -> None:
        self.seats = seats

    def figures(self, in_flight: int) -> Load:
        running = min(in_flight, self.seats)
        return Load(running=running, waiting=in_flight - running, cache_used=0.5, preemptions=0)


@given(seats=st.integers(8, 400))
def test_it_finds_the_seats_of_an_engine_and_stays_there(seats: int) -> None:
    machine, target = Machine(seats), first_target(BOUNDS)
    history = []
    for _ in range(300):
        target = next_target(target, target.samples, machine.figures(target.samples), BOUNDS)
        history.append(target.samples)
    late = history[100:]
    assert sum(min(samples, seats) for samples in late) / len(late) >= 0.85 * seats, "it is kept full"
    assert max(late) <= max(seats * (1 + BACKLOG), seats + BOUNDS.step) + 2 * BOUNDS.step, "and not overfull"


def test_an_engine_that_tells_late_is_not_flooded() -> None:
    machine, target = Machine(100), first_target(BOUNDS)
    late = [machine.figures(0)] * 6
    for _ in range(60):
        late.append(machine.figures(target.samples))
        target = next_target(target, target.samples, late.pop(0), BOUNDS)
        assert target.samples <= 256, "twice what was found to be too much"


def test_it_follows_an_engine_that_has_less_room_later() -> None:
    target = first_target(BOUNDS)
    for seats, near in ((200, 200), (50, 50), (300, 300)):
        machine = Machine(seats)
        for _ in range(120):
            target = next_target(target, target.samples, machine.figures(target.samples), BOUNDS)
        assert 0.75 * near <= target.samples <= 1.3 * near


class Line:
    """An engine with so many seats that makes a token a seat and step; a look is made every `look` steps.

    Its server writes an answer in `writing` steps and reads no request meanwhile, as one with one thread does: samples
    that end together are followed by others that begin together.
    """

    def __init__(self, seats: int, lengths: list[int], writing: float, look: int = 50) -> None:
        self.seats, self.lengths, self.writing, self.look = seats, lengths, writing, look
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.asked = self.now = self.tokens = self.started = 0
        self.busy_until = 0.0

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    def until_the_next_look(self, target: int) -> Load:
        for _ in range(self.look):
            if self.busy_until <= self.now:
                while self.in_flight < target:
                    self.waiting.append(self.lengths[self.started % len(self.lengths)])
                    self.started += 1
            free = self.seats - len(self.running)
            self.running += self.waiting[:free]
            self.waiting = self.waiting[free:]
            self.tokens += len(self.running)
            left = [length - 1 for length in self.running if length > 1]
            if ended := len(self.running) - len(left):
                self.busy_until = max(self.busy_until, self.now) + self.writing * ended
            self.running = left
            self.now += 1
        return Load(len(self.running), len(self.waiting), 0.3, 0)


@pytest.mark.parametrize("lengths", [[128], [512], [128, 128, 128, 60], [40 + 37 * n % 176 for n in range(97)]])
@pytest.mark.parametrize("writing", [0.1, 0.5])
def test_samples_that_end_together_do_not_leave_seats_empty_for_long(lengths: list[int], writing: float) -> None:
    line, target, sizes = Line(64, lengths, writing), Target(64, met=True), []
    for _ in range(100):
        began = (line.tokens, line.now)
        target = next_target(target, line.in_flight, line.until_the_next_look(target.samples), BOUNDS)
        sizes.append(((line.tokens - began[0]) / (line.now - began[1]) / line.seats, target.samples))
    assert sum(share for share, _ in sizes[50:]) / 50 > 0.97
    assert sum(samples for _, samples in sizes[50:]) / 50 <= 64 * (1 + BACKLOG) + 2 * BOUNDS.step
