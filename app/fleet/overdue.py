"""How long a lease may stay in each state.

Invariant: pure; every state that may cost money has an end that time alone brings about: the lease is given up where
that can do no harm, and otherwise somebody is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.fleet import starts
from app.storage.models import Lease, LeaseState

UNSETTLED_FACTOR = 2.0
"""A create call whose outcome is open for so many settling times can only be settled by a list that can be read."""
RELEASE_S = 300.0
"""A destroyed machine is gone by then."""
EXPIRED_S = 600.0
"""A lease that works is renewed long before its end; this long after it, nobody is left on it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """From the settings, seconds."""

    settle_s: float
    join_s: float
    listening_since: float = 0.0
    """When this process began, seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A lease that stayed too long, and whether it is to be given up or only told of."""

    why: str
    give_up: bool


def judge(lease: Lease, now: float, limits: Limits) -> Overdue | None:
    """What to do about a lease that is as it is; None while it is in time."""
    state, still = LeaseState(lease.state), now - lease.state_since
    if state in (LeaseState.INTENT, LeaseState.UNKNOWN) and still > UNSETTLED_FACTOR * limits.settle_s:
        return Overdue(f"whether the create call made a machine is open for {still:.0f} s", give_up=False)
    if state is LeaseState.BOOTING and (why := starts.late_machine(lease, now, limits.join_s, limits.listening_since)):
        return Overdue(why, give_up=True)
    if state is LeaseState.ACTIVE and now - lease.expires_at > EXPIRED_S:
        return Overdue(f"its lease ended {now - lease.expires_at:.0f} s ago and was not renewed", give_up=True)
    if state is LeaseState.RELEASING and still > RELEASE_S:
        tries = f"{lease.release_attempts} destroy calls"
        return Overdue(f"not gone {still:.0f} s after its release was decided ({tries}): look for instance "
                       f"{lease.instance_id} in the provider's console", give_up=False)  # fmt: skip
    return None
