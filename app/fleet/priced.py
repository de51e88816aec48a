"""One offer as a job sees it, and what has to be known to see it so. Pure.

Invariant: values only; an offer's price in all parts, its throughput and their ratio follow from what is held here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.fleet import pricing
from app.fleet.estimates import Estimate, Measurement, Workload
from app.fleet.lives import LONGEST_H, PRIOR_H, Lives
from app.protocol.base import micros
from app.protocol.job import JobSpec
from providers.base import Offer

SETUP_S = 60.0
"""From the create call to the first rollout, without what has to be downloaded."""


@dataclass(frozen=True, slots=True)
class JobView:
    """What ranking needs to know of a job."""

    spec: JobSpec
    load: Workload
    traffic: pricing.Traffic
    measured: tuple[Measurement, ...] = ()
    setup_s: float = SETUP_S
    model_bytes: float = 0.0
    """A machine downloads them once in its life."""
    image_bytes: Mapping[str, float] = field(default_factory=dict)
    """The same by provider, for those whose machines pull an image."""
    lives: Lives | None = None
    """What was seen of machines; None: only the guess."""
    pools: frozenset[str] = frozenset()
    """Providers whose offers are pools, of which more than one machine may be rented."""

    @property
    def cap(self) -> int | None:
        """The user's, micro-dollars per hour of rent."""
        most = self.spec.fleet.max_price_per_hour
        return None if most is None else micros(most)

    def start_bytes(self, provider: str) -> float:
        """Image and model."""
        return self.image_bytes.get(provider, 0.0) + self.model_bytes

    def start_s(self, provider: str, down_mbps: float) -> float:
        """From renting to the first rollout on such a link."""
        return pricing.start_s(self.setup_s, self.start_bytes(provider), down_mbps)

    def life_h(self, provider: str, gpu_name: str, machine_id: str = "") -> float:
        """Expected hours, without the host's own end."""
        if self.lives is None:
            return min(PRIOR_H[self.spec.fleet.interruptible], LONGEST_H)
        return self.lives.of(provider, gpu_name, machine_id)


@dataclass(frozen=True, slots=True)
class Priced:
    """An offer with what it would cost and do for a job."""

    offer: Offer
    rate_micros_h: int
    """The bid, or the fixed price."""
    price: pricing.Effective
    estimate: Estimate
    availability: float
    excluded: str = ""
    """Why the job may not rent it; empty if it may."""
    usual: int | None = None
    """`price.total` at what the machine cost over the last hour or so; None while it was seen only once."""
    on_demand: int | None = None
    """Rent of the same machine on demand, where that is known: no bid goes above it."""

    @property
    def mu(self) -> float:
        """Effective: times availability."""
        return self.estimate.mu * self.availability

    @property
    def rho(self) -> float:
        """Dollars per hour for one rollout per second."""
        return pricing.rho(self.price.total, self.mu)


@dataclass(frozen=True, slots=True)
class Known:
    """What the market knows besides the offers."""

    usual: Mapping[int, float] = field(default_factory=dict)
    """Row of an offer → what its compute usually costs."""
    on_demand: Mapping[int, int] = field(default_factory=dict)
    """Row of an offer → rent of the same machine on demand."""
    barred: Mapping[int, str] = field(default_factory=dict)
    """Row of an offer → why its machine is left alone."""
