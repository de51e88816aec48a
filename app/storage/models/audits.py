"""What was computed again."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base, BigId


class AuditRow(Base):
    """One audit of a group. Never changed; the sums are with the node."""

    __tablename__ = "audits"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    node_id: Mapped[str]
    work_item: Mapped[str]
    at: Mapped[float]
    version: Mapped[int]
    verdict: Mapped[str]
    fault: Mapped[str]
    tokens: Mapped[int]
    rms: Mapped[float]
    kl: Mapped[float]
    reward_ok: Mapped[bool | None]
    detail: Mapped[str] = mapped_column(Text)
    __table_args__ = (UniqueConstraint("node_id", "work_item"),)
