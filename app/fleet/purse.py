"""What may be rented over all jobs: the caps of the settings, and the credit at each provider. Pure.

Invariant: what costs money, may cost money (outcome unknown) or is not seen gone yet counts; with every lease that
`why_not` lets pass, the caps hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from app.fleet.budget import Exposure, can_rent, must_wind_down
from app.protocol.base import usd


@dataclass(frozen=True, slots=True)
class Room:
    """All jobs' money, micro-dollars, and what the settings allow."""

    burns: Mapping[str, int]
    """Provider → micro-dollars an hour of all its leases that are not seen gone."""
    staying_micros_h: int = 0
    """The same over all providers, without what is on its way out."""
    exposure: Exposure | None = None
    """Over all jobs that ever were, its budget the cap in total; None without such a cap."""
    per_hour: int | None = None
    minimum_s: float = 0.0
    """How long one more lease must be able to run."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Provider → why nothing is rented there."""
    credit: Mapping[str, int] = field(default_factory=dict)
    """Provider → what is left in the account, where that is known."""
    credit_hours: float = 0.0
    """How long credit must last."""

    @property
    def burn(self) -> int:
        """Micro-dollars an hour over all providers."""
        return sum(self.burns.values())

    @property
    def excess(self) -> int:
        """By how much what stays passes the cap per hour, because a price rose."""
        return 0 if self.per_hour is None else max(0, self.staying_micros_h - self.per_hour)

    def low(self, provider: str) -> bool:
        """Whether the provider's credit does not last long enough at what runs there."""
        return provider in self.credit and self._short(provider, 0)

    def dry(self, provider: str, margin_s: float) -> bool:
        """Whether what runs there burns the whole credit within `margin_s`: it would be stopped, and its disks kept."""
        burn = self.burns.get(provider, 0)
        return provider in self.credit and burn > 0 and self.credit[provider] * 3600 <= burn * margin_s

    def why_not(self, provider: str, price_micros_h: int, once: int = 0) -> str:
        """Why one more lease at this price, and `once` for what its start downloads, can't be; empty if it can."""
        if provider in self.closed:
            return f"{provider}: {self.closed[provider]}"
        if self.per_hour is not None and self.burn + price_micros_h > self.per_hour:
            return (
                f"max_usd_per_hour {usd(self.per_hour)}: ${usd(self.burn)}/h are rented and ${usd(price_micros_h)}/h "
                "would come on top"
            )
        if self.exposure is not None and not can_rent(self.exposure, price_micros_h, self.minimum_s, once):
            return (
                f"max_usd_total {usd(self.exposure.budget)}: ${usd(max(0, self.exposure.remaining))} are not committed"
                f", too little for a machine at ${usd(price_micros_h)}/h"
                + (f" whose start downloads for ${usd(once)}" if once else "")
            )
        if provider in self.credit and self._short(provider, price_micros_h):
            return (
                f"{provider}: its credit of ${usd(self.credit[provider])} would not last {self.credit_hours:g} h "
                "(min_credit_hours) with one more machine"
            )
        return ""

    def plus(self, provider: str, price_micros_h: int, once: int = 0) -> Room:
        """The room that is left beside one more lease."""
        burns = {**self.burns, provider: self.burns.get(provider, 0) + price_micros_h}
        held = self.exposure
        if held is not None:
            held = replace(held, pending_micros_h=held.pending_micros_h + price_micros_h, unseen=held.unseen + once)
        return replace(self, burns=burns, exposure=held, staying_micros_h=self.staying_micros_h + price_micros_h)

    def used_up(self, margin_s: float) -> bool:
        """Whether everything has to be given back now, for the cap in total to hold."""
        return self.exposure is not None and must_wind_down(self.exposure, margin_s)

    def _short(self, provider: str, more: int) -> bool:
        return self.credit[provider] < self.credit_hours * (self.burns.get(provider, 0) + more)
