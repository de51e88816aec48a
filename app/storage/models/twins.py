"""Prompts that were given to two nodes, so that their rewards can be compared."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


class Twin(Base):
    """A work item that was made as the twin of another, and what came of the two. No node is told of it."""

    __tablename__ = "twins"
    second: Mapped[str] = mapped_column(primary_key=True)
    """The work item that was made for this."""
    first: Mapped[str] = mapped_column(unique=True)
    """The one of the seeded order."""
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    wanted: Mapped[list[Any]] = mapped_column(default=list)
    """Who is to have the second, as long as they are at work; empty: any but the one that has the first."""
    came: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """The answer that came first, as long as the other has not."""
    first_node: Mapped[str | None]
    """Who answered, once the two are compared."""
    second_node: Mapped[str | None]
    rise: Mapped[list[Any]] = mapped_column(default=list)
    """`app/fleet/selection.py` says what is kept of a comparison."""
    fall: Mapped[list[Any]] = mapped_column(default=list)
    compared_at: Mapped[float | None]
