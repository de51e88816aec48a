"""How fast a node is taken to be: what it says, bounded by what it hands in. Pure.

Invariant: only time in which a node worked as it liked speaks against it: what it waited for work that it was not given
does not, nor does one delivery that is still on its way. What it handed in is never held against it.

A machine that says ten times what it does would fill the pool on paper, and the learner would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

SLACK = 1.25
"""A node may say so many times what it hands in: it measures while it generates, and swaps, requests and groups
without a reward take time, too."""
SPAN_S = 10.0
"""A span of work has at least so many seconds, and ends with a delivery."""
LEAST, RECENT, MOST = 8, 24, 40
"""Spans that are needed to judge; those that a machine is judged by that has become faster; those that are kept."""
LAG_S = 15.0
"""So much of its waiting may not be on record yet."""
ASKING_S = 0.3
"""Between an answer and the next request, when the answer was less than what was asked for."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a node handed in, in spans of work that follow on each other."""

    delivered: int
    """Rollouts in all, when the last span ended."""
    open_s: float = 0.0
    """Seconds of work since then; less than none while waiting comes on record after the time that it was in."""
    spans: Sequence[tuple[int, float]] = ()
    """Rollouts and seconds."""
    doubted: bool = False
    """It was said that this node is believed little."""

    @classmethod
    def read(cls, kept: Mapping[str, Any] | None) -> Self | None:
        """From the form that it is stored in."""
        if kept is None:
            return None
        spans = tuple((int(n), float(s)) for n, s in kept["spans"])
        return cls(int(kept["delivered"]), float(kept["open_s"]), spans, bool(kept["doubted"]))

    def stored(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        spans = [[n, round(s, 3)] for n, s in self.spans]
        return {"delivered": self.delivered, "open_s": self.open_s, "spans": spans, "doubted": self.doubted}


def seen(evidence: Evidence | None, delivered: int, worked_s: float) -> Evidence | None:
    """After a look at a node that has handed in `delivered` rollouts in all, and worked so long since the last look.

    None before its first delivery: what fills the machine at first is not counted.
    """
    if evidence is None:
        return Evidence(delivered) if delivered else None
    gained, passed = delivered - evidence.delivered, evidence.open_s + worked_s
    if gained <= 0 or passed < SPAN_S:
        return replace(evidence, open_s=passed)
    return replace(evidence, delivered=delivered, open_s=0.0, spans=(*evidence.spans, (gained, passed))[-MOST:])


def bound(evidence: Evidence | None, delivered: int) -> float | None:
    """The most rollouts per second that a node may say; None while too little is known."""
    if evidence is None or len(evidence.spans) < LEAST:
        return None
    gained, passed = delivered - evidence.delivered, evidence.open_s - LAG_S
    rates = [_rate(evidence.spans[-count:], gained, passed) for count in (RECENT, MOST)]
    known = [rate for rate in rates if rate is not None]
    return SLACK * max(known) if len(known) == len(rates) else None


def _rate(spans: Sequence[tuple[int, float]], gained: int, passed: float) -> float | None:
    """The most that a machine can have made which handed that in: one delivery more may be on its way."""
    seconds = sum(s for _, s in spans) + passed
    rollouts = sum(n for n, _ in spans) + gained + max(n for n, _ in spans)
    return rollouts / seconds if seconds > 0 else None


def share(said: float | None, most: float | None) -> float:
    """How much of what a node says is believed, from 0 to 1."""
    return 1.0 if not said or most is None else min(1.0, most / said)
