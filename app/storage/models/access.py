"""Who may call, and what was answered before."""

from __future__ import annotations

from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column

from app.storage.models.base import Base


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


class WebhookId(Base):
    """Webhooks that were accepted: a replay is answered but does nothing."""

    __tablename__ = "webhook_ids"
    id: Mapped[str] = mapped_column(primary_key=True)
    received_at: Mapped[float] = mapped_column(index=True)
