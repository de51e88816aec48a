"""What providers say that they bill."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


class ProviderBill(Base):
    """The provider's own bill of a lease, as it was read last. A lease that no bill named has no row."""

    __tablename__ = "provider_bills"
    lease_id: Mapped[str] = mapped_column(ForeignKey("leases.id"), primary_key=True)
    provider: Mapped[str] = mapped_column(index=True)
    micros: Mapped[int]
    through: Mapped[float]
    """Until when the bill reaches."""
    checked_at: Mapped[float]
    final: Mapped[bool] = mapped_column(default=False)
    """The lease is over and its bill complete: it is not read again."""
    reported_micros: Mapped[int | None]
    """Bill less ledger, as it was last told in an event; None while they agree."""
