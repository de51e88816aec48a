"""What versions weighed, and what deltas saved, as the API shows it.

Invariant: bytes saved are what nodes counted when they applied a delta in place of fetching the version whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.storage.models import Node, SnapshotRow

SHOWN = 20
"""Newest publishes that are listed."""


async def publishes(session: AsyncSession, job_id: str, nodes: Sequence[Node]) -> dict[str, Any]:
    """Sizes of the newest publishes, newest first, and sums over all of them."""
    rows = list(
        await session.scalars(
            select(SnapshotRow).where(SnapshotRow.job_id == job_id).order_by(SnapshotRow.version.desc())
        )
    )
    paid = [row for row in rows if row.delta_bytes is not None]
    return {
        "versions": len(rows),
        "deltas": len(paid),
        "delta_bytes_mean": sum(row.delta_bytes or 0 for row in paid) / len(paid) if paid else None,
        "deltas_applied": sum(node.deltas_applied for node in nodes),
        "bytes_saved": sum(node.bytes_saved for node in nodes),
        "publishes": [publish_row(row) for row in rows[:SHOWN]],
    }


def publish_row(row: SnapshotRow) -> dict[str, Any]:
    """One publish. `sent` is what nodes that have its base were offered."""
    return {
        "version": row.version,
        "bytes": row.bytes,
        "sent": "full" if row.delta_bytes is None else "delta",
        "delta_base": row.delta_base,
        "delta_bytes": row.delta_bytes,
        "delta_share": row.delta_share,
        "note": row.delta_note,
        "stored": "full" if row.stored else "delta" if row.delta_stored else None,
    }
