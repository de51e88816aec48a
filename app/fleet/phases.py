"""Slow or stuck: how far a machine's start has come, and whether it moves.

Invariant: pure. A start that moves is left alone up to a bound that always comes; one that does not move for its
phase's limit is stuck, and the reason names the phase. Who tells nothing is judged by the clock alone, as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.protocol.startup import StartPhase, StartProgress

LIMITS_S: Mapping[StartPhase, float] = {
    # From the first word of the machine; pulling its image comes before that.
    StartPhase.BOOTING: 180.0,
    # The script tells the size of what is unpacked every few seconds: a package that compiles may take a while.
    StartPhase.INSTALLING: 300.0,
    StartPhase.JOINING: 180.0,
    StartPhase.FETCHING: 180.0,
    # No bytes to see: weights are read, kernels are compiled, graphs are captured. The agent gives vLLM 900 s for that,
    # and then says more than could be said here.
    StartPhase.LOADING: 960.0,
    StartPhase.WARMING: 300.0,
    StartPhase.TESTING: 180.0,
}
"""So long a phase may stand still."""
LOAD_BYTES_S = 50e6
"""A model's files are read and put on the GPU at least that fast."""
PATIENCE = 4.0
"""A start that moves all the time may take so many times `join_timeout_seconds`."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a start stands. Times are the service's own, seconds since the epoch."""

    phase: StartPhase
    since: float
    """When it was first told of."""
    moved_at: float
    """When it last came further."""
    have: int | None = None
    total: int | None = None
    detail: str = ""


def advance(old: Standing | None, told: StartProgress, now: float) -> Standing:
    """The standing after a word of the machine.

    A new phase and bytes that grow are progress. A phase that was passed before is none: a script that is started over
    and over does not look as if it came further. From active on a reload begins anew.
    """
    if old is None or told.phase.rank > old.phase.rank or (old.phase is StartPhase.ACTIVE and told.phase != old.phase):
        return Standing(told.phase, now, now, told.have, told.total, told.detail)
    if told.phase.rank < old.phase.rank:
        return replace(old, detail=f"{told.phase} again {told.detail}".strip()[:200])
    grown = told.have is not None and (old.have is None or told.have > old.have)
    have = told.have if grown else old.have
    return replace(old, moved_at=now if grown else old.moved_at, have=have, total=told.total, detail=told.detail)


def limit_s(phase: StartPhase, model_bytes: int = 0) -> float | None:
    """How long `phase` may stand still, seconds; None: for ever."""
    limit = LIMITS_S.get(phase)
    if limit is not None and phase is StartPhase.LOADING:
        return limit + model_bytes / LOAD_BYTES_S
    return limit


def words(standing: Standing) -> str:
    """The phase and how far it is: `fetching model.safetensors, 1.2 of 3.4 GB`."""
    text = f"{standing.phase} {standing.detail}".strip()
    if standing.have is None:
        return text
    total = f" of {standing.total / 1e9:.2f}" if standing.total else ""
    return f"{text}, {standing.have / 1e9:.2f}{total} GB"


def stuck(
    standing: Standing, now: float, *, began: float, join_s: float, model_bytes: int = 0, waits: bool = False
) -> str:
    """Why a start that tells of itself has to be given up at `now`; empty while it need not.

    `began`: when the machine was rented, or its node joined. `waits`: what it is to fetch in this phase is not there
    yet, which is not its fault. `join_s`: the setting.
    """
    if standing.phase is StartPhase.ACTIVE or (waits and standing.phase is StartPhase.WARMING):
        return ""
    still, limit = now - standing.moved_at, limit_s(standing.phase, model_bytes)
    if limit is not None and still > limit and not (waits and standing.phase is StartPhase.FETCHING):
        return f"stuck while {words(standing)}: nothing moved for {still:.0f} s"
    if now - began > PATIENCE * join_s:
        return f"too slow: {words(standing)} after {now - began:.0f} s"
    return ""
