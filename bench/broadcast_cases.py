"""What the broadcast benchmark runs, and what one run gave. Pure.

Invariant: a case says everything about its network and its faults, so that two runs of it differ by chance only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MTU, SEGMENT = 1500, 1448
MB = 1_000_000
MIDDLE_LEAF = 400
"""Leaf from which on a liar lies: about the middle of 100 MB."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `slow`, `liar`, `kill` and `cut` are nodes (1…n); the last two die at half of the limit."""

    name: str
    transport: str = "chain"
    n: int = 9
    rtt_ms: float = 40.0
    size: int = 100 * MB
    learner_mbps: float = 200.0
    node_mbps: float = 100.0
    slow: int | None = None
    liar: int | None = None
    lies: int = 1_000_000
    """How many leaves in a row the liar falsifies."""
    kill: int | None = None
    cut: int | None = None
    pause_s: float = 2.5
    warm_up: int = 20 * MB
    congestion: str = "cubic"
    idle_restart: bool = False
    """Whether the hosts' TCP starts slowly after a pause: Linux's default; docs/broadcast.md says to turn it off."""

    @property
    def limit_s(self) -> float:
        """M / B_w, headers counted."""
        return self.size * 8 * MTU / SEGMENT / (min(self.node_mbps, self.learner_mbps) * 1e6)

    @property
    def excepted(self) -> int | None:
        """The node whose own time doesn't count in its row."""
        return self.slow or self.liar


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds per node that finished, what else was told, and CPU seconds per node."""

    case: Case
    done: dict[int, float]
    told: list[dict[str, Any]] = field(default_factory=list)
    cpu_s: float = 0.0

    def seconds(self) -> float:
        """When the last node had it."""
        return max(s for host, s in self.done.items() if host != self.case.excepted)


def star(n: int = 9, **more: Any) -> Case:
    """The learner serves every node itself."""
    return Case("star", "star", n=n, warm_up=2 * MB, **more)


QUICK = [Case("chains", size=50 * MB, pause_s=1.0), star(size=50 * MB, pause_s=1.0)]
"""Smaller, so that it stays under a minute."""
FULL = [
    Case("chains", n=1),
    Case("chains", n=3),
    Case("chains"),
    Case("chains", n=16),
    star(1),
    star(3),
    star(),
    star(16),
    Case("chains, hosts not tuned", idle_restart=True),
    Case("chains, 100 ms", rtt_ms=100),
    Case("one hop, 1 Gbit/s", n=1, rtt_ms=20, size=500 * MB, learner_mbps=1000, node_mbps=1000),
    Case("a node killed at half time", kill=3),
    Case("a node cut off silently at half time", cut=3),
    Case("a node at half rate", slow=4),
    Case("a node that flips one bit", liar=3, lies=1),
    Case("a node that falsifies its second half", liar=3),
]
SHARDCAST = [Case("SHARDCAST", "shardcast", n=n, warm_up=0) for n in (1, 3, 9)]
"""Its tree has one relay, which is a host of its own with an uplink like the learner's."""
