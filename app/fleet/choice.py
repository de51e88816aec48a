"""An offer that was chosen. Invariant: the numbers are those of the decision, whatever the market does meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from providers.base import Offer


@dataclass(frozen=True, slots=True)
class Choice:
    """An offer that was chosen, with what the decision knew about it."""

    offer: Offer
    rate_micros_h: int
    """The bid, or the fixed price."""
    effective_micros_h: int
    mu: float
    start_micros_h: int = 0
    """The part of it that the start costs."""
    image_micros: int = 0
    """What its image costs to download."""
    model_micros: int = 0
    """The same of the model."""
