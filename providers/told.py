"""What a provider tells of money and of what is coming.

Invariant: as the provider said it; nothing here is reckoned by us.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal


@dataclass(frozen=True, slots=True)
class Balance:
    """Money left at the provider."""

    credit_micros: int


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of the provider's own bill."""

    provider: str
    instance_id: str
    label: str
    kind: Literal["gpu", "disk", "download", "upload"]
    micros: int
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Notice:
    """The provider says that an instance will be taken away."""

    provider: str
    instance_id: str
    kind: Literal["interruption", "rebalance"]
    at: datetime | None


@dataclass(frozen=True, slots=True)
class PriceIncrease:
    """A host wants more for a machine that we rent. Nothing changes until it is accepted; if it never is, the contract
    ends at its end."""

    provider: str
    instance_id: str
    increase_id: str
    compute_micros_h: int
    """Whole machine, without disk and traffic."""
