"""How long a broadcast took is told by nodes that were there for it."""

from __future__ import annotations

import pytest

from app.fleet.broadcasts import broadcast_s
from app.storage.models import Node, SnapshotRow


def node(since: float, version_at: float | None) -> Node:
    return Node(state_since=since, version_at=version_at)


@pytest.mark.parametrize(
    ("version", "active", "seconds"),
    [
        (1, [node(50.0, 103.0), node(60.0, 107.0)], 7.0),
        (1, [node(50.0, 103.0), node(101.0, 190.0)], 3.0),  # one that was rented after the publish
        (1, [node(101.0, 190.0)], None),  # nobody was there
        (1, [], None),
        (0, [node(50.0, 103.0)], None),  # v0 waits for the first machines
    ],
)
def test_only_who_was_at_work_at_the_publish_tells(version: int, active: list[Node], seconds: float | None) -> None:
    assert broadcast_s(SnapshotRow(version=version, published_at=100.0), active) == seconds
