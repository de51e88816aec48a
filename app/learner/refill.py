"""Making up for groups without a signal. Pure.

A group whose answers all got the same reward has no gradient; with many of them a batch shrinks unnoticed. What is in
the buffer beyond the next step's batch would grow stale there, so that is what a step is filled up with.

Invariant: a step never waits for a refill, never takes from the next step's batch what that one could still use, and
never consumes more than `most` groups. So a refill can't deadlock and makes nobody wait: where nothing is to spare, the
step goes on with what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spare:
    """A group that is there beyond a step's batch: whether it has a signal, and whether the next step may use it."""

    signal: bool
    lasts: bool


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's answers got different rewards."""
    return len(set(rewards)) > 1


def extra(batch: Sequence[bool], rest: Sequence[Spare], *, prompts: int, most: int) -> int:
    """How many groups of `rest`, oldest first, go into this step too.

    `batch` says of each group taken already whether it has a signal; the aim is `prompts` groups that have. The
    youngest `prompts` of those that last are left for the next step.
    """
    free = len(rest) - min(prompts, sum(s.lasts for s in rest))
    missing = prompts - sum(batch)
    count = 0
    while missing > 0 and count < free and len(batch) + count < most:
        missing -= rest[count].signal
        count += 1
    return count
