"""Where leased work is, what a node gives back when it leaves, and when it has made too many faults to go on."""

from __future__ import annotations

import pytest

from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from tests.unit.rollout_agent.fakes import Clock


def leased(clock: Clock) -> WorkLedger:
    ledger = WorkLedger(clock)
    ledger.leased({"soon": clock() + 10, "later": clock() + 60, "last": clock() + 60})
    return ledger


def test_what_is_leased_is_handed_back_until_it_is_answered() -> None:
    clock = Clock()
    ledger = leased(clock)
    assert (ledger.in_flight, sorted(ledger.unfinished())) == (3, ["last", "later", "soon"])
    ledger.settled(["later", "never leased"])
    assert (ledger.in_flight, sorted(ledger.unfinished())) == (2, ["last", "soon"])


def test_a_lease_that_is_over_is_nothing_to_hand_back() -> None:
    clock = Clock()
    ledger = leased(clock)
    clock.now += 10
    assert sorted(ledger.unfinished()) == ["last", "later"]
    ledger.give_up(["soon", "later"])
    assert (ledger.in_flight, sorted(ledger.unfinished())) == (1, ["last", "later"])
    clock.now += 50
    assert ledger.unfinished() == []


def test_what_was_given_up_is_handed_back_unless_somebody_has_taken_it_over() -> None:
    clock = Clock()
    ledger = leased(clock)
    ledger.give_up(["soon", "never leased"])
    ledger.give_up(["later"])
    assert (ledger.in_flight, sorted(ledger.unfinished())) == (1, ["last", "later", "soon"])
    ledger.passed_on(["later", "never given up"])
    assert sorted(ledger.unfinished()) == ["last", "soon"]


def test_an_item_that_comes_again_is_held_to_its_newest_deadline() -> None:
    clock = Clock()
    ledger = leased(clock)
    ledger.give_up(["soon"])
    ledger.leased({"soon": clock() + 100})
    clock.now += 70
    assert ledger.unfinished() == ["soon"]


def test_an_item_that_comes_again_and_is_answered_is_not_handed_back() -> None:
    ledger = leased(Clock())
    ledger.give_up(["later"])
    ledger.leased({"later": 1060.0})
    ledger.settled(["later"])
    assert sorted(ledger.unfinished()) == ["last", "soon"]


def test_tokens_are_added_up_by_what_became_of_them() -> None:
    ledger = WorkLedger(Clock())
    for tokens in (5, 7):
        ledger.sampled(tokens)
        ledger.waste("stale", tokens)
    ledger.waste("interrupted", 0)
    assert ledger.tokens_generated == 12
    assert dict(ledger.tokens_wasted) == {"stale": 12}, "what lost nothing isn't named"


def test_a_node_ends_after_so_many_faults_in_a_row_and_accepted_work_begins_a_new_row() -> None:
    ledger = WorkLedger(Clock())
    for _ in range(MAX_FAULTS - 1):
        ledger.fault("refused", "hash")
    assert ledger.faults_in_a_row == MAX_FAULTS - 1
    ledger.accepted(late=0)
    assert (ledger.faults_in_a_row, dict(ledger.errors)) == (0, {"refused": MAX_FAULTS - 1})
    for _ in range(MAX_FAULTS - 1):
        ledger.fault("refused", "hash")
    with pytest.raises(WorkerFault, match="5 faults in a row, the last: too_large: of 9 bytes") as ended:
        ledger.fault("too_large", "of 9 bytes")
    assert ended.value.kind == "too_large"
    assert dict(ledger.errors) == {"refused": 2 * MAX_FAULTS - 2, "too_large": 1}


def test_items_that_were_accepted_too_late_are_counted() -> None:
    ledger = WorkLedger(Clock())
    ledger.accepted(late=2)
    ledger.accepted(late=1)
    assert dict(ledger.errors) == {"late": 3}
