"""Which held-out answers the learner computes again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.heldout import chosen, share
from app.protocol.trust_spec import TrustSpec
from app.storage.models import ExamItem

OFF = TrustSpec(audit_share=0, probation=0, each_version=False)


def items(count: int, failures: int = 0) -> list[ExamItem]:
    return [ExamItem(id=f"j-eval-2-{i}", failures=failures) for i in range(count)]


def pick(
    found: list[ExamItem],
    trust: TrustSpec,
    *,
    passed: int = 8,
    interruptible: bool = False,
    nodes: int = 5,
    of: int = 1024,
    draw: Callable[[], float] = lambda: 0.5,
) -> list[str]:
    part = share(trust, interruptible=interruptible, items=of, nodes=nodes)
    return [i.id for i in chosen(found, trust, passed=passed, share=part, draw=draw)]


@pytest.mark.parametrize("passed", [0, 7])
def test_all_answers_of_a_node_on_probation(passed: int) -> None:
    assert len(pick(items(5), TrustSpec(), passed=passed)) == 5


def test_after_it_a_share_drawn_for_each_twice_of_machines_that_may_be_taken_away() -> None:
    draw = random.Random(1).random
    trust = TrustSpec(audit_share=0.1)
    found = len(pick(items(4000), trust, draw=draw))
    assert 330 < found < 470
    assert 700 < len(pick(items(4000), trust, draw=draw, interruptible=True)) < 900


@pytest.mark.parametrize(
    ("nodes", "of", "part"), [(5, 1024, 40 / 1024), (1, 1024, 0.02), (2, 48, 1 / 3), (5, 30, 1.0), (0, 32, 0.25)]
)
def test_so_many_of_each_evaluation_that_its_result_can_not_be_made_up(nodes: int, of: int, part: float) -> None:
    assert share(TrustSpec(), interruptible=False, items=of, nodes=nodes) == pytest.approx(part)
    assert share(TrustSpec(each_version=False), interruptible=False, items=of, nodes=nodes) == 0.02


def test_who_lies_in_half_of_its_answers_is_seen_in_nearly_every_evaluation() -> None:
    draw = random.Random(2).random
    # A node has a fifth of 1,024 answers; each lie that is computed again is found.
    seen = sum(bool(pick(items(102), TrustSpec(), draw=draw)) for _ in range(1000))
    assert seen > 970


def test_what_was_answered_falsely_before_is_looked_at_in_any_case() -> None:
    assert len(pick(items(3, failures=1), TrustSpec(audit_share=0, each_version=False))) == 3


@given(count=st.integers(0, 20), passed=st.integers(0, 20), failures=st.integers(0, 2))
def test_nothing_where_the_job_wants_no_audits(count: int, passed: int, failures: int) -> None:
    assert pick(items(count, failures), OFF, passed=passed, draw=lambda: 0.0) == []
