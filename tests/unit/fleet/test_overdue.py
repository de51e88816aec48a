"""How long a lease may stay in each state."""

from __future__ import annotations

import pytest

from app.fleet.overdue import Limits, judge
from app.storage.models import OPEN_STATES, Lease, LeaseState

LIMITS = Limits(settle_s=90.0, join_s=600.0)
T0 = 1_000_000.0
HOURS = 6 * 3600.0


def lease(state: LeaseState) -> Lease:
    made = Lease(id="l", state=state, state_since=T0, created_at=T0, expires_at=T0 + HOURS, release_attempts=3)
    made.instance_id = None if state in (LeaseState.INTENT, LeaseState.UNKNOWN) else "7"
    return made


@pytest.mark.parametrize(
    ("state", "in_time", "too_long", "give_up"),
    [
        (LeaseState.INTENT, 180.0, 181.0, False),
        (LeaseState.UNKNOWN, 180.0, 181.0, False),
        (LeaseState.BOOTING, 600.0, 601.0, True),
        (LeaseState.ACTIVE, HOURS + 600.0, HOURS + 601.0, True),
        (LeaseState.RELEASING, 300.0, 301.0, False),
    ],
)
def test_each_state_that_costs_has_an_end(state: LeaseState, in_time: float, too_long: float, give_up: bool) -> None:
    assert judge(lease(state), T0 + in_time, LIMITS) is None
    found = judge(lease(state), T0 + too_long, LIMITS)
    assert found is not None
    assert found.give_up is give_up
    assert any(c.isdigit() for c in found.why), "it says for how long"


def test_what_is_not_gone_is_to_be_looked_for_by_a_person() -> None:
    found = judge(lease(LeaseState.RELEASING), T0 + 400.0, LIMITS)
    assert found is not None
    assert found.why.startswith("not gone 400 s after its release was decided (3 destroy calls)")
    assert "instance 7" in found.why


def test_how_long_it_has_been_so_is_told() -> None:
    unsettled, expired = lease(LeaseState.UNKNOWN), lease(LeaseState.ACTIVE)
    said = [judge(unsettled, T0 + 200.0, LIMITS), judge(expired, T0 + HOURS + 700.0, LIMITS)]
    assert [one.why for one in said if one] == [
        "whether the create call made a machine is open for 200 s", "its lease ended 700 s ago and was not renewed"
    ]  # fmt: skip


def test_no_open_state_was_forgotten() -> None:
    for state in OPEN_STATES:
        assert judge(lease(state), T0 + 10 * HOURS, LIMITS) is not None, state


@pytest.mark.parametrize("state", [LeaseState.RELEASED, LeaseState.REFUSED])
def test_what_is_over_is_left_alone(state: LeaseState) -> None:
    assert judge(lease(state), T0 + 10 * HOURS, LIMITS) is None
