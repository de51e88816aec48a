"""What may be trained on, in which order, and what becomes of the rest."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest

from app.learner.buffer import REMEMBERED, ReplayBuffer, admissible, lag_histogram
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
    assert ends_a_wait(buffer, lambda: buffer.add(group("a")))


def ends_a_wait(buffer: ReplayBuffer, change: Callable[[], object], prompts: int = 1) -> bool:
    """Whether who waits for a batch goes on at once when this happens."""
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(buffer.wait(0, 3, prompts, timeout_s=20)), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    change()
    waiting.join(5)
    return found == [True]


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.reject("b", "invalid"),
        lambda buffer: buffer.discard("b"),
        lambda buffer: buffer.withdraw(["b"], []),
    ],
)
def test_who_waits_for_a_step_to_be_made_again_goes_on_as_soon_as_it_can_not_be(
    change: Callable[[ReplayBuffer], None], caplog: pytest.LogCaptureFixture
):
    buffer = ReplayBuffer()
    buffer.plan({1: ["a", "b"]})
    for name in ("a", "x", "y"):
        buffer.add(group(name))
    assert ends_a_wait(buffer, lambda: change(buffer), prompts=3)
    assert "can't be made again from the same groups" in caplog.text


def test_who_waits_goes_on_when_what_was_set_aside_is_put_back():
    buffer = ReplayBuffer()
    buffer.add(_of("n", "a"))
    aside = buffer.set_aside(["n"])
    assert ends_a_wait(buffer, lambda: buffer.put_back(aside))


def test_so_many_work_items_are_remembered_and_the_oldest_are_forgotten():
    buffer = ReplayBuffer()
    buffer.note(f"w{i}" for i in range(REMEMBERED + 1))
    assert not buffer.add(group("w1"))
    assert buffer.add(group("w0"))


def test_lags_count_rollouts():
    groups = [group("a", version=[4, 4, 3, 5]), group("b", version=5)]
    assert lag_histogram(groups, 5) == {0: 5, 1: 2, 2: 1}


def _of(node: str, name: str, version: int = 0):
    return dataclasses.replace(group(name, version=version), node=node)


def test_a_group_with_a_fault_is_dropped_unless_something_was_made_of_it():
    buffer = ReplayBuffer()
    for name in ("a", "b"):
        buffer.add(group(name))
    (trained,), _ = buffer.take(0, 3, 1)
    buffer.discard("b")
    buffer.discard("never came")
    buffer.discard(trained.work_item)
    assert [(d.work_item, d.reason) for d in buffer.evict(0, 3)] == [("b", "invalid"), ("never came", "invalid")]
    assert len(buffer) == 0
    assert not buffer.add(group("b"))


def test_what_is_withdrawn_is_forgotten_and_welcome_from_others():
    buffer = ReplayBuffer()
    for node, name in (("n", "a"), ("n", "b"), ("m", "c"), ("m", "d")):
        buffer.add(_of(node, name))
    buffer.note(["trained on"])
    buffer.withdraw(["a", "b", "trained on"], ["n"])
    assert buffer.evict(0, 3) == []
    assert len(buffer) == 2
    assert [buffer.add(_of("o", name)) for name in ("a", "b", "d", "trained on")] == [True, True, False, True]


def test_a_note_of_what_is_withdrawn_is_not_told_and_refuses_nobody_elses_answer():
    buffer = ReplayBuffer()
    buffer.reject("a", "invalid", "n")
    buffer.add(_of("n", "b", version=0))
    buffer.reject("c", "unscored", "m")
    assert len(buffer) + buffer.unreported == 3
    buffer.withdraw((), ["n"])
    assert [(d.work_item, d.reason) for d in buffer.evict(9, 3)] == [("c", "unscored")]
    assert [buffer.add(_of("o", name)) for name in ("a", "b", "c")] == [True, True, False]


def test_what_another_node_has_answered_by_the_time_that_it_is_withdrawn_stays():
    buffer = ReplayBuffer()
    buffer.withdraw((), ["n"])
    buffer.add(_of("m", "a"))
    buffer.withdraw(["a"], ["n"])
    assert [g.work_item for g in buffer.take(0, 3, 1)[0]] == ["a"]


def test_what_is_set_aside_is_not_taken_and_comes_back_to_its_place():
    buffer = ReplayBuffer()
    for node, name in (("n", "a"), ("m", "b"), ("n", "c")):
        buffer.add(_of(node, name))
    aside = buffer.set_aside(["n"])
    assert not buffer.ready(0, 3, 2)
    buffer.add(_of("m", "d"))
    buffer.put_back(aside)
    assert [g.work_item for g in buffer.take(0, 3, 4)[0]] == ["a", "b", "c", "d"]


def test_a_step_that_was_to_be_made_again_from_what_is_withdrawn_is_made_from_others():
    buffer = ReplayBuffer()
    buffer.plan({1: ["a", "b"]})
    buffer.add(_of("n", "a"))
    aside = buffer.set_aside(["n"])
    buffer.put_back(aside)
    buffer.add(_of("m", "b"))
    assert buffer.ready(0, 3, 5), "set aside and put back changes nothing"
    buffer.withdraw((), ["n"])
    for name in ("c", "d"):
        buffer.add(_of("m", name))
    assert not buffer.ready(0, 3, 5)
    assert [g.work_item for g in buffer.take(0, 3, 3)[0]] == ["b", "c", "d"]


def test_all_that_a_withdrawn_node_ever_brought_is_welcome_again_and_the_rest_of_a_plan_stays():
    buffer = ReplayBuffer()
    for name in ("trained", "here"):
        buffer.add(_of("n", name))
    buffer.plan({1: ["trained"], 2: ["later"]})
    buffer.take(0, 3, 1)
    buffer.withdraw((), ["n"])
    assert [buffer.add(_of("m", name)) for name in ("trained", "here")] == [True, True]
    assert buffer.replays(1), "none of what it is to be made from is withdrawn"
