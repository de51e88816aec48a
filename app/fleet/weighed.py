"""A decision about a job's pool. Pure. Invariant: it is kept with all that it was made of."""

from __future__ import annotations

from dataclasses import dataclass

from app.fleet import activation
from app.fleet.ranking import Ranking

URGENT = 0.7
"""A pool below this share of its target is filled at once."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A decision and what it was made of."""

    running: list[activation.Running]
    wanted: Ranking
    """The offers that the candidates of the decision were taken from."""
    decision: activation.Decision
    slots: int
    """The most machines that the job may have at once, those on their way out left out."""
    most: float
    """The most throughput that one machine may count for."""
    target: float
    policy: activation.Policy

    @property
    def planned(self) -> float:
        """Throughput of what runs and of what boots."""
        return sum(r.candidate.mu for r in self.running)

    @property
    def urgent(self) -> bool:
        """Whether waiting for a second look would cost more than it saves."""
        leaving = any(
            r.endangered or r.ending or (r.outbid and r.candidate.key not in self.decision.rebid) for r in self.running
        )
        return leaving or self.planned < URGENT * self.target or len(self.running) > self.slots
