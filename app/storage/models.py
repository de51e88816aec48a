"""The tables. All state of the control service is here.

Invariant: moments are seconds since the epoch (UTC), money is integer micro-dollars, ledger entries are never changed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BigId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only in a column of type INTEGER."""


class Base(DeclarativeBase):
    """All tables, with named constraints so that migrations can address them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: JSON, list[Any]: JSON, int: BigInteger, str: String}  # noqa: RUF012


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


class ItemStatus(StrEnum):
    """pending → leased → accepted → trained | dropped."""

    PENDING = "pending"
    LEASED = "leased"
    ACCEPTED = "accepted"
    TRAINED = "trained"
    DROPPED = "dropped"


class ApiKey(Base):
    """A user's key; only its hash is kept."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    key_hash: Mapped[str] = mapped_column(unique=True)
    admin: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]


class IdempotencyRecord(Base):
    """The first answer to a POST with an Idempotency-Key."""

    __tablename__ = "idempotency"
    key: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    status: Mapped[int | None]
    body: Mapped[str | None] = mapped_column(Text)
    location: Mapped[str | None]
    created_at: Mapped[float]


class Job(Base):
    """A job: what was asked, where it stands, what was measured."""

    __tablename__ = "jobs"
    seq: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(index=True)
    status_reason: Mapped[str] = mapped_column(Text, default="")
    status_since: Mapped[float]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    outcome: Mapped[str | None]
    """Set when it begins to drain: the final status that it will have."""
    budget_micros: Mapped[int]
    max_nodes: Mapped[int]
    staleness_budget: Mapped[int]
    publish_period: Mapped[int]
    step: Mapped[int] = mapped_column(default=0)
    published_version: Mapped[int | None]
    next_ordinal: Mapped[int] = mapped_column(default=0)
    """How many work items were made: the position in the seeded prompt order."""
    learner_epoch: Mapped[int] = mapped_column(default=0)
    learner_pid: Mapped[int | None]
    learner_state: Mapped[str] = mapped_column(default="")
    learner_seen_at: Mapped[float | None]
    learner_started_at: Mapped[float | None]
    learner_starts: Mapped[int] = mapped_column(default=0)
    learner_done: Mapped[bool] = mapped_column(default=False)
    ready_at: Mapped[float | None]
    relay_url: Mapped[str] = mapped_column(default="")
    manifest_public_key: Mapped[str] = mapped_column(default="")
    assets: Mapped[list[Any]] = mapped_column(default=list)
    parameters: Mapped[int | None]
    snapshot_bytes: Mapped[int | None]
    train_prompts: Mapped[int | None]
    t_train: Mapped[float | None]
    """Smoothed; the rehearsal's until a step was measured."""
    t_bcast: Mapped[float | None]
    train_seconds: Mapped[float] = mapped_column(default=0.0)
    idle_seconds: Mapped[float] = mapped_column(default=0.0)
    """Waiting after the first step: the time until the first rollouts arrive is start-up, not a bubble."""
    bytes_from_learner: Mapped[int] = mapped_column(default=0)
    reward_train: Mapped[float | None]
    reward_eval: Mapped[float | None]
    reward_eval_initial: Mapped[float | None]
    rollouts_accepted: Mapped[int] = mapped_column(default=0)
    rollouts_trained: Mapped[int] = mapped_column(default=0)
    rollouts_dropped: Mapped[int] = mapped_column(default=0)
    capacity: Mapped[dict[str, Any]] = mapped_column(default=dict)
    nodes_peak: Mapped[int] = mapped_column(default=0)
    chain_depth_max: Mapped[int] = mapped_column(default=0)
    preemptions: Mapped[int] = mapped_column(default=0)
    price_events: Mapped[int] = mapped_column(default=0)
    final_prefix: Mapped[str | None]


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
    release_attempts: Mapped[int] = mapped_column(default=0)
    release_wanted: Mapped[bool] = mapped_column(default=False)
    """Give it back as soon as its fate is known."""
    retire_after: Mapped[list[Any]] = mapped_column(default=list)
    """Leases that take its place: it is given back once they work."""
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
    chain: Mapped[int | None]
    chain_position: Mapped[int | None]
    upstreams: Mapped[list[Any]] = mapped_column(default=list)
    upstream: Mapped[str] = mapped_column(default="")
    """Where it says that it pulls from now."""
    mu_measured: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    busy_share: Mapped[float | None]
    rollouts_accepted: Mapped[int] = mapped_column(default=0)
    files_refused: Mapped[int] = mapped_column(default=0)
    bytes_down: Mapped[int] = mapped_column(default=0)
    bytes_up: Mapped[int] = mapped_column(default=0)
    bytes_from: Mapped[dict[str, Any]] = mapped_column(default=dict)
    bytes_relayed: Mapped[int] = mapped_column(default=0)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    errors: Mapped[dict[str, Any]] = mapped_column(default=dict)
    drain: Mapped[bool] = mapped_column(default=False)
    lies: Mapped[int] = mapped_column(default=0)


class WorkItem(Base):
    """One prompt × group size."""

    __tablename__ = "work_items"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    ordinal: Mapped[int]
    prompt_index: Mapped[int]
    seed: Mapped[int]
    status: Mapped[str]
    node_id: Mapped[str | None]
    leased_version: Mapped[int | None]
    deadline_at: Mapped[float | None]
    attempts: Mapped[int] = mapped_column(default=0)
    trajectory_seq: Mapped[int | None]
    version: Mapped[int | None]
    """Oldest policy version of its tokens, once accepted."""
    trained_step: Mapped[int | None]
    drop_reason: Mapped[str | None]
    __table_args__ = (
        Index("ix_work_items_job_status", "job_id", "status"),
        Index("ix_work_items_node", "node_id"),
        Index("ix_work_items_trajectory", "trajectory_seq"),
        UniqueConstraint("job_id", "ordinal"),
    )


class Trajectory(Base):
    """An accepted file."""

    __tablename__ = "trajectories"
    seq: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    node_id: Mapped[str]
    key: Mapped[str] = mapped_column(unique=True)
    size: Mapped[int]
    blake3: Mapped[str]
    rollouts: Mapped[int]
    created_at: Mapped[float]


class Step(Base):
    """One learner step, one evaluation, or both."""

    __tablename__ = "steps"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    t_train: Mapped[float]
    t_idle: Mapped[float]
    reward: Mapped[float]
    rollouts: Mapped[int]
    dropped: Mapped[int]
    lags: Mapped[dict[str, Any]]
    metrics: Mapped[dict[str, Any]]
    nodes: Mapped[int]
    mu_pool: Mapped[float]
    spent_micros: Mapped[int]


class Evaluation(Base):
    """Held-out reward of a version."""

    __tablename__ = "evaluations"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    step: Mapped[int]
    reward: Mapped[float]
    prompts: Mapped[int]
    at: Mapped[float]


class SnapshotRow(Base):
    """A published version and its broadcast."""

    __tablename__ = "snapshots"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    bytes: Mapped[int]
    chunks: Mapped[int]
    stored: Mapped[bool] = mapped_column(default=False)
    published_at: Mapped[float]
    completed_at: Mapped[float | None]


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


class Event(Base):
    """Something that happened, in words that a person can read."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str | None] = mapped_column(index=True)
    at: Mapped[float]
    kind: Mapped[str]
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class SpotPrice(Base):
    """The last price that a webhook told for a selector."""

    __tablename__ = "spot_prices"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    provider: Mapped[str] = mapped_column(index=True)
    selector: Mapped[dict[str, Any]]
    micros_h: Mapped[int]
    effective_at: Mapped[float]
    received_at: Mapped[float]


class WebhookId(Base):
    """Webhooks that were accepted: a replay is answered but does nothing."""

    __tablename__ = "webhook_ids"
    id: Mapped[str] = mapped_column(primary_key=True)
    received_at: Mapped[float] = mapped_column(index=True)


class Cooldown(Base):
    """A machine that is left alone for a while; each further failure doubles it."""

    __tablename__ = "cooldowns"
    provider: Mapped[str] = mapped_column(primary_key=True)
    machine_id: Mapped[str] = mapped_column(primary_key=True)
    until: Mapped[float]
    count: Mapped[int]
    reason: Mapped[str] = mapped_column(Text)
