"""What is still to be told to the outside.

Invariant: a job's events are its messages, so a message is in the database as soon as, and only if, its event is; the
row here says how far they were delivered.
"""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


class Outbox(Base):
    """One row for each job with a `notify_url`."""

    __tablename__ = "outbox"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    event_id: Mapped[int] = mapped_column(default=0)
    """The last event that was delivered, dropped, or passed over as one that is not told."""
    attempts: Mapped[int] = mapped_column(default=0)
    """How often the next one failed."""
    next_at: Mapped[float] = mapped_column(index=True)
    """When it may be tried."""
