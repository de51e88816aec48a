"""The model's files as the job's row keeps them: what the learner announced, and what is wanted in the store.

Invariant: what one learner process was asked to put into the store, the next one is asked for, too. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.protocol.learner import AssetInfo

Row = dict[str, Any]
"""An `AssetInfo` as JSON, with `wanted` true where a node did not get the file from the Hub, and `stored` true once the
learner has put it into the store then."""


def announced(before: Sequence[Row], assets: Sequence[AssetInfo]) -> list[Row]:
    """The rows after a learner has announced `assets`."""
    rows = [asset.model_dump() for asset in assets]
    return want(rows) if wanted(before) else rows


def want(rows: Sequence[Row]) -> list[Row]:
    """The rows once a node did not get one of these files from the Hub: all that lie there are wanted."""
    return [{**row, "wanted": True} if row.get("hub") else row for row in rows]


def wanted(rows: Sequence[Row]) -> bool:
    """Whether the learner is to put files into the store that are on the Hub."""
    return any(row.get("wanted") for row in rows)


def coming(rows: Sequence[Row]) -> bool:
    """Whether files are wanted in the store that are not there yet."""
    return any(row.get("wanted") and not row.get("stored") for row in rows)


def stored(rows: Sequence[Row]) -> list[Row]:
    """The rows once the learner has put there what is wanted."""
    return [{**row, "stored": True} if row.get("wanted") else row for row in rows]
