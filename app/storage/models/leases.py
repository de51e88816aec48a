"""What we pay for. Ledger entries are never changed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base, BigId


class LeaseState(StrEnum):
    """intent → (unknown) → booting → active → releasing → released; refused when no machine was ever made."""

    INTENT = "intent"
    """Committed; the create call is about to be sent, or is under way."""
    UNKNOWN = "unknown"
    """The create call's outcome is not known; settled by looking the label up."""
    BOOTING = "booting"
    """The instance exists; its node has not joined."""
    ACTIVE = "active"
    """Its node has joined."""
    RELEASING = "releasing"
    """Destroy was decided; not yet seen gone."""
    RELEASED = "released"
    REFUSED = "refused"

    @property
    def open(self) -> bool:
        """Whether it may cost money."""
        return self not in (LeaseState.RELEASED, LeaseState.REFUSED)

    @property
    def usable(self) -> bool:
        """Whether it counts as capacity now or soon."""
        return self in (LeaseState.INTENT, LeaseState.UNKNOWN, LeaseState.BOOTING, LeaseState.ACTIVE)


OPEN_STATES = tuple(s for s in LeaseState if s.open)


class Lease(Base):
    """Something we pay for: the record of money."""

    __tablename__ = "leases"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    provider: Mapped[str]
    offer_id: Mapped[str]
    machine_id: Mapped[str]
    gpu_name: Mapped[str]
    num_gpus: Mapped[int]
    region: Mapped[str] = mapped_column(default="")
    billing: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    state_since: Mapped[float]
    reason: Mapped[str] = mapped_column(Text, default="")
    label: Mapped[str] = mapped_column(unique=True)
    instance_id: Mapped[str | None]
    quoted_micros_h: Mapped[int]
    """Compute, as the offer said."""
    rate_micros_h: Mapped[int]
    """Compute, as billed now: the bid, or the price in force."""
    market_micros_h: Mapped[int]
    """What keeping it would cost now: follows spot prices."""
    agreed_micros_h: Mapped[int] = mapped_column(default=0)
    """Compute, as was agreed last: the fixed price, the bid, an increase that was accepted. 0: nothing was."""
    announced_micros_h: Mapped[int | None]
    """Compute, as its host wants to have it; None while it wants nothing."""
    announced_id: Mapped[str | None]
    """What the provider calls that wish."""
    host_ends_at: Mapped[float | None]
    """When its host ends the contract, by the provider's word."""
    start_micros_h: Mapped[int] = mapped_column(default=0)
    """The part of the effective price that its start cost: spent once it works."""
    image_micros: Mapped[int] = mapped_column(default=0)
    """What the download of its image may cost, which its node can't count; 0 once its bill is known."""
    model_micros: Mapped[int] = mapped_column(default=0)
    """The same of the model, which its node counts."""
    disk_gb: Mapped[float]
    disk_micros_gb_month: Mapped[int]
    upload_micros_gb: Mapped[int]
    download_micros_gb: Mapped[int]
    up_mbps: Mapped[float]
    down_mbps: Mapped[float]
    reliability: Mapped[float]
    mu_prior: Mapped[float]
    effective_micros_h: Mapped[int]
    join_token_hash: Mapped[str] = mapped_column(unique=True)
    join_token_used_at: Mapped[float | None]
    created_at: Mapped[float]
    exists_since: Mapped[float | None]
    """When the instance began to exist: disk is billed from here."""
    gpu_since: Mapped[float | None]
    """When the GPU's billing began, by the provider's word."""
    gpu_running: Mapped[bool] = mapped_column(default=False)
    ended_at: Mapped[float | None]
    """When the provider accepted the release, or was seen without it."""
    expires_at: Mapped[float]
    missing_lists: Mapped[int] = mapped_column(default=0)
    interrupted: Mapped[bool] = mapped_column(default=False)
    endangered_since: Mapped[float | None]
    """When the provider said that it may soon take the machine away."""
    release_attempts: Mapped[int] = mapped_column(default=0)
    release_wanted: Mapped[bool] = mapped_column(default=False)
    """Give it back as soon as its fate is known."""
    retire_after: Mapped[list[Any]] = mapped_column(default=list)
    """Leases that take its place: it is given back once they work."""
    phase: Mapped[str | None]
    """How far its start has come, by the machine's own word (`app/fleet/phases.py`); None while it says nothing."""
    phase_detail: Mapped[str] = mapped_column(Text, default="")
    phase_since: Mapped[float | None]
    phase_moved_at: Mapped[float | None]
    phase_have: Mapped[int | None]
    phase_total: Mapped[int | None]
    gpu_ram_mb: Mapped[int] = mapped_column(default=0)
    """Per GPU, as the offer said; 0: it did not."""
    facts: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """What the machine found in itself."""
    gpu_until: Mapped[float | None]
    disk_until: Mapped[float | None]
    gpu_carry: Mapped[int] = mapped_column(default=0)
    disk_carry: Mapped[int] = mapped_column(default=0)
    download_carry: Mapped[int] = mapped_column(default=0)
    upload_carry: Mapped[int] = mapped_column(default=0)
    download_bytes: Mapped[int] = mapped_column(default=0)
    """Seen, by the node's heartbeats."""
    download_billed: Mapped[int] = mapped_column(default=0)
    """Of these, in the ledger."""
    upload_bytes: Mapped[int] = mapped_column(default=0)
    upload_billed: Mapped[int] = mapped_column(default=0)
    spent_gpu: Mapped[int] = mapped_column(default=0)
    spent_disk: Mapped[int] = mapped_column(default=0)
    spent_download: Mapped[int] = mapped_column(default=0)
    spent_upload: Mapped[int] = mapped_column(default=0)


class LedgerEntry(Base):
    """Money spent in an interval. Append-only."""

    __tablename__ = "ledger"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    lease_id: Mapped[str] = mapped_column(ForeignKey("leases.id"), index=True)
    provider: Mapped[str]
    kind: Mapped[str]
    start: Mapped[float]
    end: Mapped[float]
    micros: Mapped[int]


class SpotPrice(Base):
    """A price that a webhook told for a selector: it counts until its provider's offers are read anew."""

    __tablename__ = "spot_prices"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    provider: Mapped[str]
    selector: Mapped[dict[str, Any]]
    micros_h: Mapped[int]
    effective_at: Mapped[float]
    received_at: Mapped[float]
    __table_args__ = (Index("ix_spot_prices_provider", "provider", "received_at"),)


class Cooldown(Base):
    """A machine that is left alone for a while; each further failure doubles it."""

    __tablename__ = "cooldowns"
    provider: Mapped[str] = mapped_column(primary_key=True)
    machine_id: Mapped[str] = mapped_column(primary_key=True)
    until: Mapped[float]
    count: Mapped[int]
    reason: Mapped[str] = mapped_column(Text)
