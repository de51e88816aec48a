"""Who works, and the versions that they work under."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


class Node(Base):
    """The agent that lives on a lease: the record of work."""

    __tablename__ = "nodes"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    lease_id: Mapped[str] = mapped_column(ForeignKey("leases.id"), unique=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(index=True)
    state_since: Mapped[float]
    reason: Mapped[str] = mapped_column(Text, default="")
    engine: Mapped[str]
    relay_url: Mapped[str | None]
    joined_at: Mapped[float]
    heartbeat_at: Mapped[float]
    policy_version: Mapped[int | None]
    versions_at: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    """Its newest versions, ascending, each as [version, when it was first heard of with it]."""
    chain: Mapped[int | None]
    chain_position: Mapped[int | None]
    upstreams: Mapped[list[Any]] = mapped_column(default=list)
    upstream: Mapped[str] = mapped_column(default="")
    """Where it says that it pulls from now."""
    mu_measured: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    busy_share: Mapped[float | None]
    tokens_generated: Mapped[int] = mapped_column(default=0, server_default="0")
    tokens_wasted: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """Tokens of no use by reason, as the node counts them."""
    rollouts_accepted: Mapped[int] = mapped_column(default=0)
    rollouts_delivered: Mapped[int] = mapped_column(default=0, server_default="0")
    """Accepted ones, those that came too late to be trained on, and answers to held-out prompts."""
    waited_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """For work that it was not given, since its last heartbeat."""
    evidence: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """Of its speed; `app/fleet/believed.py` says what is kept."""
    files_refused: Mapped[int] = mapped_column(default=0)
    bytes_down: Mapped[int] = mapped_column(default=0)
    bytes_up: Mapped[int] = mapped_column(default=0)
    bytes_from: Mapped[dict[str, Any]] = mapped_column(default=dict)
    bytes_relayed: Mapped[int] = mapped_column(default=0)
    deltas_applied: Mapped[int] = mapped_column(default=0)
    bytes_saved: Mapped[int] = mapped_column(default=0)
    up_measured: Mapped[float | None]
    """Mbit/s; `app/fleet/links.py` says what is measured and what is used of it."""
    up_used: Mapped[float | None]
    down_measured: Mapped[float | None]
    down_used: Mapped[float | None]
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    errors: Mapped[dict[str, Any]] = mapped_column(default=dict)
    drain: Mapped[bool] = mapped_column(default=False)
    lies: Mapped[int] = mapped_column(default=0)
    audits: Mapped[int] = mapped_column(default=0, server_default="0")
    """Groups of it that the learner computed again; `app/fleet/trust.py` says what is kept of them."""
    audits_passed: Mapped[int] = mapped_column(default=0, server_default="0")
    audit_failures: Mapped[int] = mapped_column(default=0, server_default="0")
    audit_rms: Mapped[float | None]
    audit_kl: Mapped[float | None]
    audit_drift: Mapped[float] = mapped_column(default=0.0, server_default="0")
    audit_surprise: Mapped[float] = mapped_column(default=0.0, server_default="0")
    audit_variance: Mapped[float] = mapped_column(default=0.0, server_default="0")
    audit_spread: Mapped[float] = mapped_column(default=0.0, server_default="0")
    audit_jump: Mapped[float] = mapped_column(default=0.0, server_default="0")
    audit_excess: Mapped[float] = mapped_column(default=0.0, server_default="0")
    audit_ungreedy: Mapped[float] = mapped_column(default=0.0, server_default="0")
    twins: Mapped[int] = mapped_column(default=0, server_default="0")
    """Groups of it that were held against another node's answer to the same prompt."""
    twin_doubt: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """What they say against it; `app/fleet/selection.py`."""
    caught: Mapped[str | None] = mapped_column(Text)
    """What it handed in that no honest node does: it is put into quarantine in the next round."""
    quarantined_at: Mapped[float | None]


class SnapshotRow(Base):
    """A published version and its broadcast."""

    __tablename__ = "snapshots"
    __table_args__ = (
        Index(
            "ix_snapshots_open",
            "job_id",
            sqlite_where=text("completed_at IS NULL"),
            postgresql_where=text("completed_at IS NULL"),
        ),
    )
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    bytes: Mapped[int]
    chunks: Mapped[int]
    stored: Mapped[bool] = mapped_column(default=False)
    """It is in the object store whole."""
    delta_base: Mapped[int | None]
    """The version from which its delta leads here; None when it has none."""
    delta_bytes: Mapped[int | None]
    delta_chunks: Mapped[int | None]
    delta_stored: Mapped[bool] = mapped_column(default=False)
    delta_share: Mapped[float | None]
    """Bytes of the delta, or what they would have been, over those of the version."""
    delta_note: Mapped[str] = mapped_column(Text, default="")
    """Why there is no delta."""
    published_at: Mapped[float]
    completed_at: Mapped[float | None]
    """When every active node had it."""
    broadcast_s: Mapped[float | None]
    """Seconds from the publish until the last of those had it that were at work by then; None for v0, which waits for
    the first machines, where nobody was at work, and of versions that were overtaken."""
