"""A node that says more than it does is cut to about what it does; one that tells the truth is left alone, however its
work comes."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.fleet import believed
from app.fleet.believed import LEAST, RECENT, SPAN_S, Evidence
from app.fleet.waiting import FORGET_S, MOST_KNOWN, Waits

BEAT_S = 10
LONG_S = 2000
GROUP = 4


@dataclass(frozen=True)
class Second:
    """Of a node's life: what it handed in, and whether it waited for work."""

    delivered: float
    waited: bool = False


def shares(life: Iterator[Second], said: float, late: int = 0) -> list[float]:
    """How much of its word was believed at each heartbeat; waiting comes on record so many seconds `late`."""
    evidence: Evidence | None = None
    found, delivered, worked = [], 0.0, 0.0
    unknown = deque([False] * late)
    for second, part in enumerate(life, 1):
        delivered += part.delivered
        unknown.append(part.waited)
        worked += 1 - unknown.popleft()
        if second % BEAT_S == 0:
            evidence = believed.seen(evidence, int(delivered), worked)
            worked = 0.0
            found.append(believed.share(said, believed.bound(evidence, int(delivered))))
    return found


def steady(rate: float, every: int = 1, start: int = 0, swap: float = 0.0) -> Iterator[Second]:
    """What was made in `every` seconds comes at once; nothing before `start`. `swap`: share of the time that new
    versions take."""
    for second in range(1, LONG_S + 1):
        yield Second(rate * (1 - swap) * every if second > start and second % every == 0 else 0.0)


def starved(rate: float, on: int, off: int, load: float, every: int) -> Iterator[Second]:
    """`on` seconds with as much work as it takes, then `off` in which it waits and has so much of a full load."""
    made = 0.0
    for second in range(1, LONG_S + 1):
        waits = second % (on + off) >= on
        made += rate * load if waits else rate
        handed, made = (made, 0.0) if second % every == 0 else (0.0, made)
        yield Second(handed, waits)


def long_groups(rate: float, latency: int, group: int, seed: int) -> Iterator[Second]:
    """Always as many groups under way as give that rate, each of its own length; a new one for each that ends."""
    draw = random.Random(seed)
    count = max(1, round(rate * latency / group))
    ends = [latency * draw.uniform(0.3, 1.7) for _ in range(count)]
    for second in range(1, LONG_S + 1):
        done = [i for i, end in enumerate(ends) if end <= second]
        for i in done:
            ends[i] += latency * draw.uniform(0.3, 1.7)
        yield Second(group * len(done))


@example(rate=1.0, every=200, start=0, swap=0.15)
@given(rate=st.floats(0.05, 500), every=st.integers(1, 200), start=st.integers(0, 600), swap=st.floats(0, 0.15))
@settings(max_examples=25, deadline=None)
def test_who_tells_the_truth_is_believed_whatever_its_bursts(rate: float, every: int, start: int, swap: float):
    assert min(shares(steady(rate, every, start, swap), rate)) > 0.97


@given(
    rate=st.floats(0.5, 500), on=st.integers(1, 200), off=st.integers(1, 600), load=st.floats(0, 1),
    every=st.integers(1, 30),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_who_is_given_nothing_is_believed(rate: float, on: int, off: int, load: float, every: int):
    assert min(shares(starved(rate, on, off, load, every), rate)) > 0.97


@pytest.mark.parametrize("late", [0, 5, 12])
def test_waiting_that_another_process_counted_is_known_late(late: int):
    rate = 10.0
    life = starved(rate * 0.8, on=95, off=40, load=0.0, every=1)
    assert min(shares(life, rate, late)) > 0.97


@pytest.mark.parametrize(("latency", "worst"), [(60, 1.0), (300, 0.8), (900, 0.7)])
def test_long_completions_are_no_lie(latency: int, worst: float):
    """Completions of a quarter of an hour come so rarely that chance alone costs some trust, for a while."""
    rate = 16 * GROUP / latency
    lives = [shares(long_groups(rate, latency, GROUP, seed), rate) for seed in range(100)]
    assert min(min(found) for found in lives) >= worst
    assert min(sum(found) / len(found) for found in lives) > 0.97


@given(rate=st.floats(0.5, 500), times=st.floats(2, 50), every=st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_who_says_many_times_what_it_does_is_cut_to_about_that(rate: float, times: float, every: int):
    found = shares(steady(rate, every), rate * times)
    enough = int((RECENT + 2) * max(SPAN_S, every, BEAT_S) / BEAT_S) + 10
    assert max(found[enough:]) * times < 1.5
    assert min(found) * times >= 1.0, "but never below what it does"


@given(rate=st.floats(0.5, 500), on=st.integers(20, 200), off=st.integers(1, 100), every=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_waiting_now_and_then_hides_no_lie(rate: float, on: int, off: int, every: int):
    found = shares(starved(rate, on, off, 0.0, every), rate * 10)
    assert found[-1] * 10 < 1.6


def test_silence_after_deliveries_lowers_what_is_believed():
    evidence = None
    for count in range(1, LEAST + 2):
        evidence = believed.seen(evidence, 100 * count, SPAN_S)
    assert evidence is not None
    now = believed.bound(evidence, 100 * (LEAST + 1))
    later = believed.bound(believed.seen(evidence, 100 * (LEAST + 1), 900.0), 100 * (LEAST + 1))
    assert now is not None
    assert later is not None
    assert later < now / 5


@pytest.mark.parametrize(
    ("spans", "delivered", "open_s", "rate"),
    [
        (((100, 10.0),) * 8, 800, 15.0, 900 / 80),  # one more delivery may be on its way
        (((100, 10.0),) * 8, 850, 15.0, 950 / 80),  # what came since counts
        (((100, 10.0),) * 7 + ((300, 10.0),), 1000, 15.0, 1300 / 80),  # and the largest may be
        (((100, 10.0),) * 8, 800, 0.0, 900 / 65),  # of its waiting a quarter of a minute is not on record yet
        (((100, 10.0),) * 8, 800, 95.0, 900 / 160),
        (((10, 10.0),) * 16 + ((100, 10.0),) * 24, 2560, 15.0, 2500 / 240),  # it has become faster
        (((100, 10.0),) * 16 + ((10, 10.0),) * 24, 1840, 15.0, 1940 / 400),  # or was so once
    ],
)
def test_a_node_may_say_a_quarter_more_than_what_it_can_have_made(
    spans: tuple[tuple[int, float], ...], delivered: int, open_s: float, rate: float
):
    before = sum(n for n, _ in spans)
    assert believed.bound(Evidence(before, open_s, spans), delivered) == pytest.approx(1.25 * rate)


def test_spans_end_with_a_delivery_and_the_newest_are_kept():
    first = believed.seen(None, 10, 500.0)
    assert first == Evidence(10), "what fills the machine at first is left out"
    waits = believed.seen(first, 10, 60.0)
    assert waits == Evidence(10, 60.0), "nothing came"
    short = believed.seen(first, 14, 4.0)
    assert short == Evidence(10, 4.0), "a span is longer"
    assert believed.seen(short, 14, 6.0) == Evidence(14, 0.0, ((4, 10.0),))
    many = Evidence(0, 0.0, tuple((n, 10.0) for n in range(40)), doubted=True)
    after = believed.seen(many, 99, 10.0)
    assert after == Evidence(99, 0.0, (*((n, 10.0) for n in range(1, 40)), (99, 10.0)), doubted=True)


def test_where_all_was_waiting_nothing_is_said():
    assert believed.bound(Evidence(80, 0.0, ((10, 1.0),) * 8), 80) is None


def test_a_machine_that_became_faster_is_believed_before_all_is_forgotten():
    slow_then_fast = [*list(steady(1.0))[:1000], *list(steady(10.0))[:260]]
    assert shares(iter(slow_then_fast), 10.0)[-1] == 1.0


def test_too_little_is_known_at_first():
    assert believed.share(50.0, believed.bound(None, 0)) == 1.0
    assert believed.seen(None, 0, 500.0) is None
    assert believed.bound(Evidence(5, 0.0, ((1, 10.0),) * (LEAST - 1)), 5) is None
    assert believed.share(None, 3.0) == 1.0


def test_what_is_kept_comes_back_as_it_was():
    evidence = Evidence(7, -2.5, ((3, 10.0), (4, 12.5)), doubted=True)
    assert Evidence.read(json.loads(json.dumps(evidence.stored()))) == evidence
    assert Evidence.read(None) is None


def test_seconds_of_waiting_are_counted_once():
    waits = Waits()
    waits.note("a", 10.0, 12.0, short=False)
    waits.note("a", 11.0, 13.0, short=False)
    waits.note("b", 0.0, 5.0, short=False)
    assert waits.take("a") == pytest.approx(3.0)
    assert waits.take("a") == 0.0
    assert waits.take("b") == 5.0
    assert waits.take("c") == 0.0


def test_however_often_a_node_asks_it_waits_no_longer_than_time_passes():
    waits = Waits()
    for tenth in range(100):
        waits.note("a", tenth / 10, tenth / 10, short=True)
    assert waits.take("a") == pytest.approx(9.9 + believed.ASKING_S)


def test_waits_that_are_due_are_those_that_other_processes_should_know():
    waits = Waits()
    waits.note("a", 0.0, 5.0, short=False)
    assert not waits.due("a")
    waits.note("a", 5.0, 20.0, short=False)
    assert waits.due("a")
    assert not waits.due("b")


def test_nodes_that_are_gone_are_forgotten():
    waits = Waits()
    for number in range(MOST_KNOWN):
        waits.note(f"old{number}", 0.0, 1.0, short=False)
    waits.note("new", 2 * FORGET_S, 2 * FORGET_S + 1, short=False)
    assert waits.take("new") == 1.0
    assert waits.take("old1") == 0.0
