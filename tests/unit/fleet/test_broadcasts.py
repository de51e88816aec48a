"""How long a broadcast took is told by nodes that were there for it."""

from __future__ import annotations

import pytest

from app.fleet.broadcasts import KEPT, broadcast_s, seen
from app.storage.models import Node, SnapshotRow


def node(since: float, *versions: tuple[int, float]) -> Node:
    return Node(state_since=since, versions_at=[list(row) for row in versions])


@pytest.mark.parametrize(
    ("version", "active", "seconds"),
    [
        (1, [node(50.0, (0, 50.0), (1, 103.0)), node(60.0, (1, 107.0))], 7.0),
        (1, [node(50.0, (1, 103.0)), node(101.0, (1, 190.0))], 3.0),  # one that was rented after the publish
        (1, [node(50.0, (1, 103.0), (2, 130.0)), node(50.0, (1, 104.0))], 4.0),  # one has the next one already
        (1, [node(50.0, (0, 50.0), (2, 130.0)), node(50.0, (1, 104.0))], 30.0),  # one never had this one alone
        (1, [node(101.0, (1, 190.0))], None),  # nobody was there
        (1, [], None),
        (1, [node(50.0), node(50.0, (1, 104.0))], None),  # not known of one: of before this was kept
        (1, [node(50.0, (1, 99.0))], 0.0),  # a clock that was set back
        (0, [node(50.0, (0, 103.0))], None),  # v0 waits for the first machines
    ],
)
def test_only_who_was_at_work_at_the_publish_tells(version: int, active: list[Node], seconds: float | None) -> None:
    assert broadcast_s(SnapshotRow(version=version, published_at=100.0), active) == seconds


def test_a_version_arrives_once_however_often_the_engine_is_loaded_with_it() -> None:
    rows: list[list[float]] = []
    for version, now in ((5, 1.0), (6, 2.0), (None, 3.0), (6, 40.0), (5, 41.0), (6, 42.0), (8, 50.0)):
        rows = seen(rows, version, now)
    assert rows == [[5, 1.0], [6, 2.0], [8, 50.0]]


def test_few_versions_are_remembered() -> None:
    rows: list[list[float]] = []
    for version in range(100):
        rows = seen(rows, version, float(version))
    assert [row[0] for row in rows] == list(range(100 - KEPT, 100))
