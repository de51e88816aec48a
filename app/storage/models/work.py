"""What is worked on."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import ForeignKey, Index, UniqueConstraint
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
