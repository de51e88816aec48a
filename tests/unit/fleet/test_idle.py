"""When a node that lives and does nothing is given up, and what is never held against it."""

from __future__ import annotations

import pytest

from app.fleet.idle import DRY_S, MOST_KNOWN, NEVER_ASKED_S, QUIET_S, Idle
from app.protocol.node import NodeState
from app.storage.models import Node

BEGAN = 1000.0
"""When the service began, and the job had work."""
ACTIVE = 1100.0


def node(**fields: object) -> Node:
    known = {"id": "n", "state": NodeState.ACTIVE, "state_since": ACTIVE, "drain": False, "rollouts_delivered": 0}
    return Node(**{**known, **fields})


def judged(
    idle: Idle, one: Node, now: float, *, holds: bool = False, began: float = BEGAN, works: float = BEGAN
) -> str:
    return idle.judge(one, now, holds=holds, working_since=works, listening_since=began)


def test_who_never_asks_is_given_up_soon_and_who_asked_once_later() -> None:
    idle, one = Idle(), node()
    assert judged(idle, one, ACTIVE + NEVER_ASKED_S) == ""
    assert "asked for no work for 301 s" in judged(idle, one, ACTIVE + NEVER_ASKED_S + 1)
    idle.asked("n", ACTIVE + 200)
    assert judged(idle, one, ACTIVE + 200 + QUIET_S) == ""
    assert judged(idle, one, ACTIVE + 200 + QUIET_S + 1) != ""


@pytest.mark.parametrize("fields", [{"state": NodeState.WARMING}, {"state": NodeState.DRAINING}, {"drain": True}])
def test_who_is_not_at_work_is_not_looked_at(fields: dict[str, object]) -> None:
    assert judged(Idle(), node(**fields), ACTIVE + 10 * QUIET_S) == ""


def test_who_has_work_need_not_ask() -> None:
    assert judged(Idle(), node(), ACTIVE + 10 * QUIET_S, holds=True) == ""


def test_who_asks_in_vain_is_never_given_up() -> None:
    idle, one = Idle(), node()
    for minute in range(600):
        idle.asked("n", ACTIVE + 60 * minute)
        assert judged(idle, one, ACTIVE + 60 * minute + 30) == ""


def test_times_begin_anew_with_the_service_and_the_job() -> None:
    """A node was active long before: whether it had asked by then, nobody knows."""
    later = ACTIVE + 50_000.0
    assert judged(Idle(), node(), later + QUIET_S, began=later) == ""
    assert judged(Idle(), node(), later + QUIET_S + 1, began=later) != ""


def test_a_job_that_begins_to_run_gives_its_nodes_their_time_anew() -> None:
    later = ACTIVE + 50_000.0
    assert judged(Idle(), node(), later + NEVER_ASKED_S, works=later) == ""
    assert judged(Idle(), node(), later + NEVER_ASKED_S + 1, works=later) != ""


def test_what_the_store_kept_from_working_is_not_held_against_anybody() -> None:
    idle, one = Idle(), node()
    idle.asked("n", ACTIVE)
    idle.given("n", ACTIVE)
    assert judged(idle, one, ACTIVE + DRY_S + 1) != ""
    idle.forgive(ACTIVE + DRY_S)
    assert judged(idle, one, ACTIVE + DRY_S + QUIET_S) == ""


def test_who_takes_work_and_hands_nothing_in_is_given_up_after_an_hour() -> None:
    """However often it asks again, and whether its leases run out or it gives them back."""
    idle, one = Idle(), node()
    for at in range(0, int(DRY_S) + 1, 60):
        idle.asked("n", ACTIVE + at)
        idle.given("n", ACTIVE + at)
        assert judged(idle, one, ACTIVE + at, holds=True) == ""
    assert "handed in nothing since" in judged(idle, one, ACTIVE + DRY_S + 60, holds=True)


def test_an_answer_ends_the_time() -> None:
    idle, one = Idle(), node()
    idle.given("n", ACTIVE)
    one.rollouts_delivered = 8
    assert judged(idle, one, ACTIVE + DRY_S + 1, holds=True) == ""
    # From then on it was given nothing.
    assert judged(idle, one, ACTIVE + 3 * DRY_S, holds=True) == ""
    idle.given("n", ACTIVE + 3 * DRY_S)
    assert judged(idle, one, ACTIVE + 4 * DRY_S + 1, holds=True) != ""


def test_who_goes_on_asking_after_its_end_is_not_kept_for_ever() -> None:
    idle = Idle()
    for n in range(MOST_KNOWN):
        idle.asked(f"n{n}", ACTIVE)
    idle.asked("last", ACTIVE + QUIET_S)
    assert len(idle._nodes) == 1


def test_what_is_known_of_a_node_goes_with_it() -> None:
    idle = Idle()
    idle.given("n", ACTIVE)
    idle.forget("n")
    assert judged(idle, node(), ACTIVE + DRY_S + 1, holds=True) == ""
