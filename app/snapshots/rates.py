"""What a node's link carries, measured while snapshots pass through it.

Invariant: a rate is of a window of at least WINDOW_S in which bytes flowed without a gap; it counts as the link's limit
only if the sender was held up by the network nearly all of that time and never waited for its own source. Otherwise it
says what the link carries at least.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WINDOW_S = 1.0
GAP_S, GAP_FACTOR = 0.4, 3.0
"""A receiver that got nothing for so long, and for so many times the pause before, waited for its source and not for
its link: a new window begins."""
HELD_SHARE = 0.8
STARVED_SHARE = 0.05
FULL_S = 0.001
"""A write that takes longer found the socket's buffer full. What filled the buffer before says nothing of the link."""
WEIGHT = 0.3
"""Share of the newest window in the average over a spell of sending or receiving."""


@dataclass(frozen=True, slots=True)
class Window:
    """Payload bytes that passed in `seconds`; how long of it the network held them up, and how long none were there."""

    count: int
    seconds: float
    held_s: float = 0.0
    starved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Payload bytes per second. `limited`: the way to the receiver carries no more; else it carries at least that."""

    bytes_per_s: float
    limited: bool


def judge(window: Window) -> Rate | None:
    """What a window says of the link; None: too short to say anything."""
    if window.seconds < WINDOW_S or window.count <= 0:
        return None
    held = window.held_s >= HELD_SHARE * window.seconds
    fed = window.starved_s <= STARVED_SHARE * window.seconds
    return Rate(window.count / window.seconds, held and fed)


def blend(spell: Rate | None, window: Rate) -> Rate:
    """The rate of a spell after one more window: limits are averaged, and outweigh whatever is only a lower bound."""
    if spell is None or (window.limited and not spell.limited):
        return window
    if window.limited:
        return Rate(spell.bytes_per_s + WEIGHT * (window.bytes_per_s - spell.bytes_per_s), True)
    if spell.limited:
        return spell if window.bytes_per_s <= spell.bytes_per_s else window
    return Rate(max(spell.bytes_per_s, window.bytes_per_s), False)


class _Total:
    """Seconds in which at least one of several streams did something."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.active = 0
        self._clock = clock
        self._total = 0.0
        self._since = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if not self.active:
            self._since = self._clock()
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._total += self._clock() - self._since

    @property
    def seconds(self) -> float:
        return self._total + (self._clock() - self._since if self.active else 0.0)


class SendMeter:
    """Rates of all streams of a relay together. A spell lasts as long as any stream does. One event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate: Rate | None = None
        """Of the newest spell; None until a window was full."""
        self.windows = 0
        """How many windows said something: it grows with each news."""
        self._clock = clock
        self._streams = 0
        self._held, self._starved = _Total(clock), _Total(clock)
        self._count = 0
        self._began: tuple[float, float, float] | None = None
        """Clock, seconds held up, seconds starved at the window's beginning; None before a socket was full."""
        self._spell: Rate | None = None
        self._limits = 0
        """Windows of this spell that found a limit."""

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Within this context a child is served."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self._began, self._spell, self._limits = None, None, 0

    @contextlib.contextmanager
    def sending(self, count: int) -> Iterator[None]:
        """Within this context `count` payload bytes are handed to a socket; waiting for it is the network's doing."""
        before = self._clock()
        with self._held.running():
            yield
        now = self._clock()
        if self._began is not None:
            self._count += count
            self._close(now)
        elif now - before >= FULL_S:
            self._open(now)

    @contextlib.contextmanager
    def starving(self) -> Iterator[None]:
        """Within this context a stream waits for what comes in here."""
        with self._starved.running():
            yield

    def _open(self, now: float) -> None:
        self._count = 0
        self._began = (now, self._held.seconds, self._starved.seconds)

    def _close(self, now: float) -> None:
        assert self._began is not None
        began, held, starved = self._began
        window = Window(self._count, now - began, self._held.seconds - held, self._starved.seconds - starved)
        found = judge(window)
        if found is not None:
            self._limits += found.limited
            # On a busy machine a write may take long without a full buffer: the first window holds what filled it then.
            fresh = found.limited and self._limits == 2
            self.rate = self._spell = found if fresh else blend(self._spell, found)
            self.windows += 1
            self._open(now)


class ReceiveMeter:
    """The rate at which payload comes from one kind of source. A receiver can't see why it isn't more: lower bounds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate: Rate | None = None
        self.windows = 0
        self._clock = clock
        self._count = 0
        self._began: float | None = None
        self._last = self._pause = 0.0

    def got(self, count: int) -> None:
        """`count` bytes have come."""
        now = self._clock()
        pause, before = now - self._last, self._pause
        self._last, self._pause = now, pause
        if self._began is None or pause > max(GAP_S, GAP_FACTOR * before):
            self._began, self._count = now, 0
        else:
            self._count += count
        found = judge(Window(self._count, now - self._began))
        if found is not None:
            self.rate = found
            self.windows += 1
            self._began, self._count = now, 0


class News:
    """Tells every measurement once, so that what was measured of an earlier arrangement isn't taken for the present."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def of(self, name: str, meter: SendMeter | ReceiveMeter | None) -> Rate | None:
        """The meter's rate, if it has a newer one than at the last call with this name."""
        if meter is None or meter.windows <= self._told.get(name, 0):
            return None
        self._told[name] = meter.windows
        return meter.rate
