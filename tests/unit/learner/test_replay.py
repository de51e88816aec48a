"""A step that was made before is made from the same groups, as long as they all come."""

from __future__ import annotations

import dataclasses

import pytest

from app.learner.buffer import ReplayBuffer
from app.protocol.learner import DroppedGroup
from tests.unit.learner.samples import group


def filled(**versions: int) -> ReplayBuffer:
    buffer = ReplayBuffer()
    for name, version in versions.items():
        buffer.add(group(name, version=version))
    return buffer


def names(taken) -> list[str]:
    return [g.work_item for g in taken[0]]


def test_the_plan_comes_before_age_and_in_its_own_order():
    buffer = filled(old=0, a=5, b=7, c=6)
    buffer.plan({8: ["b", "a"], 9: ["c", "old"]})
    assert names(buffer.take(7, 10, 2)) == ["b", "a"]
    assert names(buffer.take(8, 10, 2)) == ["c", "old"]


def test_after_the_plan_the_oldest_come_first_again():
    buffer = filled(a=5, b=7, old=0)
    buffer.plan({8: ["b"]})
    assert [buffer.replays(t) for t in (6, 7, 8)] == [False, True, False]
    assert names(buffer.take(7, 10, 2)) == ["b"]
    assert not buffer.replays(7)
    assert names(buffer.take(8, 10, 2)) == ["old", "a"]


def test_it_waits_for_all_of_the_plan_although_there_are_others():
    buffer = filled(x=1, y=1, a=2)
    buffer.plan({1: ["a", "b"]})
    assert not buffer.ready(0, 10, 2)
    assert names(buffer.take(0, 10, 2)) == []
    assert names(buffer.take(0, 10, 2, least=1)) == []
    buffer.add(group("b", version=0))
    assert buffer.wait(0, 10, 2, timeout_s=0)
    assert names(buffer.take(0, 10, 2)) == ["a", "b"]
    assert len(buffer) == 2


@pytest.mark.parametrize("how", ["refused", "over a lowered budget"])
def test_a_plan_that_can_not_be_kept_is_given_up_whole(how: str):
    buffer = filled(a=0, x=4, y=4, z=4)
    buffer.plan({6: ["a", "b"], 7: ["z", "x"]})
    if how == "refused":
        buffer.reject("b", "invalid")
        budget = 10
    else:
        buffer.add(group("b", version=4))
        budget = 4
    assert buffer.ready(5, budget, 2)
    first = names(buffer.take(5, budget, 2))
    assert first == (["a", "x"] if how == "refused" else ["x", "y"])
    assert "z" not in first


def test_what_a_later_step_was_made_from_does_not_grow_stale_before_it():
    """S was 4 when step 9 was made, and 3 before that: all groups come at once when the steps are made again."""
    buffer = filled(a=7, b=4, x=4)
    buffer.plan({8: ["a"], 9: ["b"]})
    taken, dropped = buffer.take(7, 3, 1)
    assert (names((taken, [])), dropped) == (["a"], [])
    assert [d.work_item for d in buffer.evict(8, 3)] == ["x"]
    assert names(buffer.take(8, 4, 1)) == ["b"]


def test_a_plan_whose_group_is_over_the_budget_drops_it_when_its_step_comes():
    buffer = filled(a=7, b=4, c=7)
    buffer.plan({8: ["a"], 9: ["b"]})
    buffer.take(7, 3, 1)
    taken, dropped = buffer.take(8, 3, 1)
    assert [g.work_item for g in taken] == ["c"]
    assert [(d.work_item, d.reason) for d in dropped] == [("b", "stale")]


def test_a_shorter_batch_is_made_again_as_short():
    buffer = filled(a=0, b=0, c=0)
    buffer.plan({1: ["c"]})
    assert names(buffer.take(0, 3, 2)) == ["c"]


def test_newer_versions_than_the_step_are_admissible_after_going_back():
    buffer = filled(a=9)
    assert names(buffer.take(4, 3, 1)) == ["a"]


def test_stale_groups_say_how_old_they_are():
    buffer = filled(a=0, b=1, c=2)
    _, dropped = buffer.take(4, 2, 9)
    assert dropped == [
        DroppedGroup(work_item="a", reason="stale", lag=4),
        DroppedGroup(work_item="b", reason="stale", lag=3),
    ]


def test_a_group_of_mixed_versions_counts_by_its_oldest_token():
    mixed = group("m", version=3)
    first = dataclasses.replace(mixed.rollouts[0], completion_ids=[1, 2, 3], logprobs=[-1.0] * 3)
    spans = dataclasses.replace(first, span_versions=[1, 3], span_starts=[0, 2])
    buffer = ReplayBuffer()
    buffer.add(dataclasses.replace(mixed, rollouts=(spans, *mixed.rollouts[1:])))
    assert buffer.ready(4, 3, 1)
    assert not buffer.ready(5, 3, 1)
