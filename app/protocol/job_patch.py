"""What may change while a job runs, and which offers a spot price is for.

Invariant: what can be patched is held to the same bounds as when it is posted.
"""

from __future__ import annotations

from decimal import Decimal

from pydantic import Field, field_validator

from app.protocol.base import Spec
from app.protocol.job import checked_dollars


class JobPatch(Spec):
    """`PATCH /v1/jobs/{id}`: what may change while the job runs."""

    budget_usd: Decimal | None = None
    staleness_budget: int | None = Field(default=None, ge=1, le=1000)
    fleet: FleetPatch | None = None

    @field_validator("budget_usd")
    @classmethod
    def _positive(cls, value: Decimal | None) -> Decimal | None:
        return value if value is None else checked_dollars(value)


class FleetPatch(Spec):
    """The part of the fleet that may change while the job runs."""

    max_nodes: int = Field(ge=1, le=10_000)


class SpotSelector(Spec):
    """Which offers a spot price is for: all given must match, `{}` matches the provider."""

    machine_id: int | str | None = None
    offer_id: int | str | None = None
    gpu_name: str | None = None
    instance_type: str | None = None
    region: str | None = None
    zone: str | None = None


JobPatch.model_rebuild()
