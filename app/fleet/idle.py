"""Nodes that cost and do nothing: they say that they live, and ask for no work, or take it and hand nothing in.

Invariant: nobody is given up for what is not its own: that there was no work, that the job or the object store stood
still, that this service was away. What is known is this process's own; after a restart all times begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.protocol.node import NodeState
from app.storage.models import Node

NEVER_ASKED_S = 300.0
"""The first thing that an agent does when it becomes active is to ask."""
QUIET_S = 2700.0
"""An agent that put a version in force (half an hour at most), or waited for the store with finished work of a lease
(as long), has asked again by then."""
DRY_S = 3600.0
"""Twice the longest lease: who was given work, and has handed in nothing for so long, never does."""
MOST_KNOWN = 4096


@dataclass(slots=True)
class _Seen:
    asked_at: float | None = None
    given_at: float | None = None
    """The first work since it handed something in."""
    delivered: int = 0


@dataclass(slots=True)
class Idle:
    """What this process has seen of its nodes. Times are the service's clock."""

    _nodes: dict[str, _Seen] = field(default_factory=dict)
    _since: float = 0.0
    """Before that nothing counts."""

    def asked(self, node_id: str, now: float) -> None:
        """A node asks for work."""
        self._nodes.setdefault(node_id, _Seen()).asked_at = now
        if len(self._nodes) > MOST_KNOWN:
            # One that was given up may go on asking.
            self._nodes = {name: seen for name, seen in self._nodes.items() if now - (seen.asked_at or 0.0) < QUIET_S}

    def given(self, node_id: str, now: float) -> None:
        """It got some."""
        seen = self._nodes.setdefault(node_id, _Seen())
        seen.given_at = now if seen.given_at is None else seen.given_at

    def forgive(self, now: float) -> None:
        """Nobody could work as it liked until now."""
        self._nodes.clear()
        self._since = now

    def forget(self, node_id: str) -> None:
        """It is no node any more."""
        self._nodes.pop(node_id, None)

    def judge(self, node: Node, now: float, *, holds: bool, working_since: float, listening_since: float) -> str:
        """Why a node is given up; empty if it is not. `holds`: work is leased to it; `working_since`: the job has work
        to give since then; `listening_since`: this service runs."""
        if node.state != NodeState.ACTIVE or node.drain:
            return ""
        seen = self._nodes.setdefault(node.id, _Seen(delivered=node.rollouts_delivered))
        if node.rollouts_delivered != seen.delivered:
            seen.delivered, seen.given_at = node.rollouts_delivered, None
        if seen.given_at is not None and now - seen.given_at > DRY_S:
            return f"it was given work {now - seen.given_at:.0f} s ago, and has handed in nothing since"
        heard = max(listening_since, self._since)
        first = seen.asked_at is None and node.state_since >= heard
        quiet = now - max(heard, working_since, node.state_since, seen.asked_at or 0.0)
        if not holds and quiet > (NEVER_ASKED_S if first else QUIET_S):
            return f"it is active, and has asked for no work for {quiet:.0f} s"
        return ""
