"""Which source a node turns to, and how long it believes one that says that it is alive. Pure.

Invariant: no two nodes can wait for each other for longer than `patience`: one of them has left another source for the
other, and those who moved are less patient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.snapshots.sources import Source

MOVED_PATIENCE_STALLS = 2.0
LIES_FORGIVEN = 1
"""Leaves of a version that a source may get wrong before it is left."""
REPAIRERS = 3
"""Sources that are asked for a single leaf before its liar is left."""


def following(sources: Sequence[Source], tried: Collection[Source], *, lied: bool) -> Source | None:
    """The source after the one that was left; None when all were tried.

    A dead one's parent has a link to spare, so it is the next of the list. A liar goes on pulling from its own: then
    the last peer of the list, the tail of another chain where there is one, serves nobody yet.
    """
    left = [source for source in sources if source not in tried]
    peers = [source for source in left if source.kind == "peer"]
    if lied and peers:
        return peers[-1]
    return left[0] if left else None


def repairers(sources: Sequence[Source], liar: Source, tried: Collection[Source]) -> list[Source]:
    """Whom to ask for a single leaf that `liar` got wrong, in order."""
    return [source for source in sources if source != liar and source not in tried][:REPAIRERS]


def patience(starve_s: float, stall_s: float, *, moved: bool) -> float:
    """Seconds without a leaf after which a source is left although it says that it is alive.

    One that was announced by waits for its own upstream, which may take a while to mend. One that was moved to in the
    middle should have the leaves; if it hasn't, it may be waiting for us.
    """
    return min(starve_s, MOVED_PATIENCE_STALLS * stall_s) if moved else starve_s
