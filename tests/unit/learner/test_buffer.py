"""What may be trained on, in which order, and what becomes of the rest."""

from __future__ import annotations

import threading

import pytest

from app.learner.buffer import ReplayBuffer, admissible, lag_histogram
from tests.unit.learner.samples import group


@pytest.mark.parametrize(
    ("version", "t", "budget", "kept"),
    [
        (0, 0, 1, True),
        (0, 1, 1, True),
        (0, 2, 1, False),
        (0, 3, 3, True),
        (0, 4, 3, False),
        (7, 10, 3, True),
        (6, 10, 3, False),
        (9, 10, 1, True),
        (12, 10, 3, True),
        (0, 11, 11, True),
        (0, 12, 11, False),
    ],
)
def test_staleness_is_counted_at_batch_time(version: int, t: int, budget: int, kept: bool):
    assert admissible(version, t, budget) is kept
    buffer = ReplayBuffer()
    buffer.add(group("a", version=version))
    assert buffer.ready(t, budget, 1) is kept
    taken, dropped = buffer.take(t, budget, 1)
    assert [g.work_item for g in taken] == (["a"] if kept else [])
    assert [(d.work_item, d.reason) for d in dropped] == ([] if kept else [("a", "stale")])
    assert len(buffer) == 0


def test_a_group_is_as_old_as_its_oldest_token():
    buffer = ReplayBuffer()
    buffer.add(group("mixed", version=[5, 5, 1, 5]))
    assert not buffer.ready(5, 3, 1)
    assert buffer.ready(4, 3, 1)


def test_oldest_admissible_first_and_equals_in_order_of_arrival():
    buffer = ReplayBuffer()
    for name, version in [("c", 3), ("a", 2), ("d", 3), ("b", 2), ("old", 0), ("e", 4)]:
        buffer.add(group(name, version=version))
    taken, dropped = buffer.take(4, 2, 3)
    assert [g.work_item for g in taken] == ["a", "b", "c"]
    assert [d.work_item for d in dropped] == ["old"]
    assert [g.work_item for g in buffer.take(4, 2, 2)[0]] == ["d", "e"]


def test_too_few_groups_are_not_taken():
    buffer = ReplayBuffer()
    buffer.add(group("a"))
    assert buffer.take(0, 1, 2) == ([], [])
    assert len(buffer) == 1


def test_waiting_in_the_queue_counts():
    buffer = ReplayBuffer()
    buffer.add(group("a", version=1))
    assert buffer.evict(3, 2) == []
    assert [d.reason for d in buffer.evict(4, 2)] == ["stale"]


def test_a_work_item_enters_once_whatever_became_of_it():
    buffer = ReplayBuffer()
    assert buffer.add(group("a"))
    assert not buffer.add(group("a"))
    buffer.take(0, 1, 1)
    assert not buffer.add(group("a"))
    buffer.note(["b"])
    assert not buffer.add(group("b"))
    buffer.reject("c", "invalid")
    buffer.reject("c", "invalid")
    assert [(d.work_item, d.reason) for d in buffer.evict(0, 1)] == [("c", "invalid")]
    assert buffer.evict(0, 1) == []


def test_wait_ends_when_the_last_group_arrives_and_at_its_timeout():
    buffer = ReplayBuffer()
    assert not buffer.wait(0, 1, 1, timeout_s=0.01)
    feeder = threading.Timer(0.05, lambda: buffer.add(group("a")))
    feeder.start()
    assert buffer.wait(0, 1, 1, timeout_s=10)
    feeder.join(5)


def test_lags_count_rollouts():
    groups = [group("a", version=[4, 4, 3, 5]), group("b", version=5)]
    assert lag_histogram(groups, 5) == {0: 5, 1: 2, 2: 1}
