"""When and how an agent ends; pure decisions.

Invariant: an agent never outlives its lease by its own clock, whatever it hears or doesn't hear from the control
service.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.protocol.errors import EchoError, Gone, Unauthorized
from app.protocol.node import Directives
from app.rollout_agent.room import Unfit
from app.rollout_agent.stalls import Hung


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an agent ends.

    `code` is the exit status: 0 in order, 1 a fault. `reachable`: the control service would hear a last word.
    `destroy`: nobody else may be there to end the rented machine.
    """

    reason: str
    code: int = 0
    reachable: bool = True
    destroy: bool = False
    unfit: bool = False
    """The machine can't do this job, whoever tries."""


@dataclass(slots=True)
class LeaseWatch:
    """What the agent knows by its own clock (monotonic seconds): the end of its lease, the last contact."""

    orphan_timeout_s: float
    expires_at: float
    last_contact: float

    @classmethod
    def start(cls, orphan_timeout_s: float, now: float, directives: Directives) -> LeaseWatch:
        """From the directives that came with the join."""
        return cls(orphan_timeout_s, now + directives.lease_expires_in_s, now)

    def contact(self, sent_at: float, directives: Directives) -> None:
        """Directives answered a heartbeat that was sent at `sent_at`; counted from then, so never too generous."""
        self.last_contact = sent_at
        self.expires_at = sent_at + directives.lease_expires_in_s

    def ending(self, now: float) -> Ending | None:
        """The ending that is due at `now`, if any."""
        if now >= self.expires_at:
            return Ending("the lease has expired", destroy=True)
        if now - self.last_contact >= self.orphan_timeout_s:
            reason = f"the control service has been unreachable for {self.orphan_timeout_s:g} s"
            return Ending(reason, code=1, reachable=False, destroy=True)
        return None

    def next_check_s(self, now: float) -> float:
        """Seconds until an ending can be due at the earliest, at most 1."""
        due = min(self.expires_at, self.last_contact + self.orphan_timeout_s)
        return min(1.0, max(0.01, due - now))


def ending_of(error: BaseException, part: str) -> Ending:
    """The ending that an error in a part of the agent means."""
    if isinstance(error, Gone):
        return Ending(f"the control service says that this node is over: {error.detail}", reachable=False, destroy=True)
    if isinstance(error, Unauthorized):
        return Ending(
            f"the control service no longer knows this node: {error.detail}", code=1, reachable=False, destroy=True
        )
    detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
    if isinstance(error, Unfit | Hung):
        return Ending(detail[:500], code=1, unfit=True)
    return Ending(f"{part}: {detail}"[:500], code=1)


def join_ending(error: EchoError) -> Ending:
    """The ending that a failed join means; says what to change."""
    if isinstance(error, Gone | Unauthorized):
        reason = f"this machine was not let in ({error.detail}); each token joins one node once: get a new one"
    else:
        reason = f"could not join: {error.detail}"
    return Ending(reason[:500], code=1, reachable=False)
