"""When a group that can't be answered is given up for good, and who still has to try."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.failures import MOST, count, held_back, hopeless, job_is_wrong


@dataclass
class Item:
    failures: int = 0
    failed_by: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("failures", "nodes", "at_work", "gone"),
    [
        (2, ["a", "b"], ["a", "b"], False),
        (3, ["a", "b"], ["a", "b", "c"], True),
        (3, ["a"], ["a", "b"], False),  # a may be what is wrong
        (9, ["a"], ["a", "b"], False),
        (3, ["a"], ["a"], True),  # there is nobody else
        (2, ["a"], ["a"], False),
        (3, ["a"], [], True),
    ],
)
def test_it_takes_three_failures_and_two_nodes_if_there_are_two(
    failures: int, nodes: list[str], at_work: list[str], gone: bool
) -> None:
    assert hopeless(failures, nodes, at_work) is gone


@pytest.mark.parametrize(
    ("nodes", "node", "at_work", "waits"),
    [
        ([], "a", ["a", "b"], False),
        (["a"], "a", ["a", "b"], True),
        (["a"], "b", ["a", "b"], False),
        (["a"], "a", ["a"], False),
        (["a", "b"], "a", ["a", "b"], False),
        (["a", "b"], "a", ["a", "b", "c"], True),
    ],
)
def test_who_failed_lets_others_try_first(nodes: list[str], node: str, at_work: list[str], waits: bool) -> None:
    assert held_back(nodes, node, at_work) is waits


@given(nodes=st.integers(1, 6), order=st.randoms(use_true_random=False))
def test_a_group_that_always_fails_is_dropped_after_a_few_tries_whoever_asks(nodes: int, order: random.Random) -> None:
    names = [f"n{i}" for i in range(nodes)]
    item, tries = Item(), 0
    while not hopeless(item.failures, item.failed_by, names):
        able = [n for n in names if not held_back(item.failed_by, n, names)]
        assert able, "somebody may always try"
        count(item, order.choice(able))
        tries += 1
    assert tries == MOST
    assert len(item.failed_by) == min(nodes, MOST)


@pytest.mark.parametrize(
    ("dropped", "accepted", "nodes", "wrong"),
    [(16, 0, 2, True), (15, 0, 2, False), (16, 1, 2, False), (0, 0, 2, False), (16, 0, 1, False), (99, 0, 1, False)],
)
def test_a_job_of_which_nothing_was_ever_accepted_is_wrong_itself_if_several_nodes_say_so(
    dropped: int, accepted: int, nodes: int, wrong: bool
) -> None:
    failed_by = [[f"n{i % nodes}"] for i in range(dropped)]
    assert job_is_wrong(failed_by, accepted, 8) is wrong
