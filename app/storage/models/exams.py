"""Held-out prompts that the fleet answers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


class ExamItem(Base):
    """One held-out prompt, to be answered by the policy of a version or a later one. Gone once the exam is over."""

    __tablename__ = "exam_items"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    """The version that the exam is of."""
    prompt_index: Mapped[int]
    samples: Mapped[int]
    greedy: Mapped[bool]
    seed: Mapped[int]
    status: Mapped[str]
    """`pending`, `leased`, `accepted`, or `dropped` when nobody could answer it."""
    node_id: Mapped[str | None]
    deadline_at: Mapped[float | None]
    version: Mapped[int | None]
    """The version that answered."""
    rewards: Mapped[list[Any]] = mapped_column(default=list)
    trajectory_seq: Mapped[int | None]
    """The file of its answer, as long as the learner has still to compute that again."""
    failures: Mapped[int] = mapped_column(default=0, server_default="0")
    """How often it was given up, or its answer found wrong."""
    failed_by: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    """Nodes that failed at it."""
    created_at: Mapped[float]
    __table_args__ = (Index("ix_exam_items_job_status", "job_id", "status"), Index("ix_exam_items_node", "node_id"))
