"""Jobs, and what happened to them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base, BigId


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
    model_revision: Mapped[str | None]
    """The commit of a model from the Hugging Face Hub: every later learner of the job loads the same."""
    parameters: Mapped[int | None]
    snapshot_bytes: Mapped[int | None]
    publish_bytes: Mapped[int | None]
    """What a node that has the version before fetched of the newest one: its delta, or all of it."""
    train_prompts: Mapped[int | None]
    eval_prompts: Mapped[int | None]
    t_train: Mapped[float | None]
    """Of the newest steps; the rehearsal's until one was measured."""
    t_bcast: Mapped[float | None]
    train_seconds: Mapped[float] = mapped_column(default=0.0)
    idle_seconds: Mapped[float] = mapped_column(default=0.0)
    """Waiting after the first step: the time until the first rollouts arrive is start-up, not a bubble."""
    bytes_from_learner: Mapped[int] = mapped_column(default=0)
    uplink_measured: Mapped[float | None]
    """B_0 in Mbit/s, as the learner's relay measures it."""
    uplink_used: Mapped[float | None]
    """What it is taken for instead of the setting."""
    reward_train: Mapped[float | None]
    reward_eval: Mapped[float | None]
    reward_eval_initial: Mapped[float | None]
    eval_step: Mapped[int | None]
    """The version that `reward_eval` is of."""
    exam_step: Mapped[int] = mapped_column(default=0, server_default="0")
    """The newest version that the fleet was asked to evaluate."""
    rollouts_accepted: Mapped[int] = mapped_column(default=0)
    rollouts_trained: Mapped[int] = mapped_column(default=0)
    rollouts_dropped: Mapped[int] = mapped_column(default=0)
    tokens_wasted: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """Tokens of no use by reason, those that the control service and no node counts."""
    length_mean: Mapped[float | None]
    """Tokens of a completion, smoothed over groups."""
    failure_rate: Mapped[float | None]
    """1 − the mean reward, held to 0…1, smoothed over groups."""
    capacity: Mapped[dict[str, Any]] = mapped_column(default=dict)
    nodes_peak: Mapped[int] = mapped_column(default=0)
    chain_depth_max: Mapped[int] = mapped_column(default=0)
    preemptions: Mapped[int] = mapped_column(default=0)
    price_events: Mapped[int] = mapped_column(default=0)
    forecast_over: Mapped[bool] = mapped_column(default=False)
    """Its owner was told that it will cost more than its budget, and not yet that it will not."""
    final_prefix: Mapped[str | None]


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
    groups: Mapped[int | None]
    """Groups that it consumed; None of steps from before that was counted."""
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
    by: Mapped[str] = mapped_column(default="learner", server_default="learner")
    """`learner` or `fleet`."""
    scores: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """pass@1, pass@k, greedy reward and the versions that answered, where the fleet evaluated."""


class Event(Base):
    """Something that happened, in words that a person can read."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str | None] = mapped_column(index=True)
    at: Mapped[float]
    kind: Mapped[str]
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)
