"""What is known of prompts and of completions that were accepted before."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


class PromptStats(Base):
    """Running statistics of one prompt's completions, from accepted groups."""

    __tablename__ = "prompt_stats"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    prompt_index: Mapped[int] = mapped_column(primary_key=True)
    tries: Mapped[int]
    """Completions."""
    successes: Mapped[float]
    """Sum of their rewards, each held to 0…1."""
    mean_length: Mapped[float]
    """Tokens of a completion; older ones count less and less."""
    updated_at: Mapped[float]


class GroupPrint(Base):
    """Fingerprint of a completion of an accepted group that chance does not make often."""

    __tablename__ = "group_prints"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    """`app/protocol/copies.py`."""
    work_item: Mapped[str]
    """The group that had it first."""
