"""What is worked on."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import ForeignKey, Index, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base, BigId


class ItemStatus(StrEnum):
    """pending → leased → accepted → trained | dropped."""

    PENDING = "pending"
    LEASED = "leased"
    ACCEPTED = "accepted"
    TRAINED = "trained"
    DROPPED = "dropped"


class WorkItem(Base):
    """One prompt × group size."""

    __tablename__ = "work_items"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    ordinal: Mapped[int]
    """Its place in the seeded order of prompts; of a twin (`Twin`) of the n-th −1 − n, which is no place in it."""
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
    trained_position: Mapped[int | None]
    """Its place in the batch of that step."""
    replay_step: Mapped[int | None]
    """The step that it was trained at before the learner went back to a checkpoint; to be trained at again."""
    drop_reason: Mapped[str | None]
    drop_lag: Mapped[int | None]
    """t − x when it was dropped."""
    group_size: Mapped[int | None]
    """Completions of this group; None: the job's."""
    partial_key: Mapped[str | None]
    """The object with what another node had sampled of it; several items may share one."""
    partial_size: Mapped[int | None]
    partial_blake3: Mapped[str | None]
    partial_version: Mapped[int | None]
    """Oldest version of the tokens in it."""
    partial_tokens: Mapped[int | None]
    """Completion tokens of this item in it."""
    partial_node: Mapped[str | None]
    """The node that handed it back."""
    written_by: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    """Nodes that sampled tokens of the group and handed it back before the one that finished it, the first one first.
    It stays when the group is accepted."""
    failures: Mapped[int] = mapped_column(default=0, server_default="0")
    """How often a node gave it up because it could not be sampled or scored."""
    failed_by: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    """Nodes that did."""
    __table_args__ = (
        # The ordinal is the order in which waiting work goes out.
        Index("ix_work_items_job_status", "job_id", "status", "ordinal"),
        Index("ix_work_items_node", "node_id"),
        Index("ix_work_items_trajectory", "trajectory_seq"),
        Index("ix_work_items_partial", "partial_key"),
        UniqueConstraint("job_id", "ordinal"),
    )


class Trajectory(Base):
    """An accepted file."""

    __tablename__ = "trajectories"
    # Learners ask for what is above the last number that they saw: one that was removed must not come again.
    __table_args__ = ({"sqlite_autoincrement": True},)
    seq: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    node_id: Mapped[str]
    key: Mapped[str] = mapped_column(unique=True)
    size: Mapped[int]
    blake3: Mapped[str]
    rollouts: Mapped[int]
    heldout: Mapped[bool] = mapped_column(default=False, server_default=false(), index=True)
    """It has answers to held-out prompts that are to be computed again; it goes when they are."""
    created_at: Mapped[float]
