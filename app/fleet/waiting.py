"""The time that nodes waited for work that they were not given, and what they are believed of their speed.

Invariant: seconds are counted once, however many requests of a node wait at a time; what this process has counted and
not put on record is at most `believed.LAG_S` old, so that several replicas of the service judge alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from app.fleet import believed
from app.protocol.node import Heartbeat, NodeState
from app.storage.models import Node

FLUSH_S = 12.0
FORGET_S = 600.0
MOST_KNOWN = 4096
GAP_S = 60.0
"""A longer silence is not held against a node."""
DOUBT = 2 / 3
"""An event tells of a node that is believed less than this share of what it says."""


@dataclass(slots=True)
class _Counted:
    seconds: float
    until: float


@dataclass(slots=True)
class Waits:
    """Counts in this process. Times are the service's clock."""

    _nodes: dict[str, _Counted] = field(default_factory=dict)

    def note(self, node_id: str, began: float, ended: float, *, short: bool) -> None:
        """A request of a node was under way from `began` to `ended`; `short`: it got less than it asked for."""
        ended += believed.ASKING_S if short else 0.0
        counted = self._nodes.setdefault(node_id, _Counted(0.0, began))
        counted.seconds += max(0.0, ended - max(began, counted.until))
        counted.until = max(counted.until, ended)
        if len(self._nodes) > MOST_KNOWN:
            self._nodes = {name: c for name, c in self._nodes.items() if c.until > ended - FORGET_S}

    def due(self, node_id: str) -> bool:
        """Whether there is so much that it should be put on record."""
        return node_id in self._nodes and self._nodes[node_id].seconds >= FLUSH_S

    def take(self, node_id: str) -> float:
        """Seconds since the last call."""
        counted = self._nodes.get(node_id)
        if counted is None:
            return 0.0
        seconds, counted.seconds = counted.seconds, 0.0
        return seconds


def believe(node: Node, beat: Heartbeat, *, passed_s: float, waited_s: float) -> float | None:
    """Take a node's word for its speed as far as it is believed; its state is already that of this heartbeat.

    `passed_s`: since the heartbeat before; `waited_s`: not on record yet. Returns the rollouts per second that it says,
    the first time that it is believed much less; else None.
    """
    waited_s, node.waited_s = node.waited_s + waited_s, 0.0
    # Nobody counted what came, or who waited, while the service was down.
    at_work = node.state == NodeState.ACTIVE and passed_s <= GAP_S
    kept = believed.Evidence.read(node.evidence)
    evidence = believed.seen(kept, node.rollouts_delivered, passed_s - waited_s if at_work else 0.0)
    share = believed.share(beat.rollouts_per_s, believed.bound(evidence, node.rollouts_delivered))
    news = evidence is not None and share < DOUBT and not evidence.doubted
    if evidence is not None:
        node.evidence = replace(evidence, doubted=evidence.doubted or news).stored()
    # A self-test beside other starts comes out low: believed, it would rent a machine that is soon given back.
    said = None if beat.probed else beat.rollouts_per_s
    node.mu_measured = None if said is None else said * share
    node.tokens_per_s = None if beat.tokens_per_s is None else beat.tokens_per_s * share
    return said if news else None
