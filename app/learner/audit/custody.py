"""Which groups wait for which audit. Not thread-safe.

Invariant: a group is in one place: with the auditor, waiting here for another group of its node and version, or gone to
be trained on; of a node in quarantine nothing is left and nothing more is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from app.learner.audit.decide import Route, route
from app.learner.buffer import Group
from app.protocol.audits import Audit
from app.protocol.trust_spec import TrustSpec


@dataclass(frozen=True, slots=True)
class Case:
    """A group that came in, and what must be known of where it came from."""

    group: Group
    interruptible: bool = False
    foreign: bool = False

    @property
    def node(self) -> str:
        """Who handed it in."""
        return self.group.node

    @property
    def version(self) -> int:
        """The newest version that it claims."""
        return max(v for r in self.group.rollouts for v in r.span_versions)


@dataclass(slots=True)
class _Standing:
    passed: int = 0
    versions: set[int] = field(default_factory=set)
    under_way: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, list[Case]] = field(default_factory=dict)


class Custody:
    """`draw` gives secret uniform numbers in [0, 1)."""

    def __init__(self, trust: TrustSpec, draw: Callable[[], float]) -> None:
        self._trust = trust
        self._draw = draw
        self._nodes: dict[str, _Standing] = {}
        self._banished: set[str] = set()

    @property
    def waiting(self) -> int:
        """Groups that wait for another one."""
        return sum(len(cases) for s in self._nodes.values() for cases in s.waiting.values())

    def banished(self, node: str) -> bool:
        """Whether nothing of a node is taken."""
        return node in self._banished

    def known(self, node: str, passed: int) -> None:
        """So many audits of a node had passed when somebody else counted."""
        standing = self._nodes.setdefault(node, _Standing())
        standing.passed = max(standing.passed, passed)

    def receive(self, case: Case) -> Route:
        """What becomes of a group; one that has to wait is kept here."""
        standing = self._nodes.setdefault(case.node, _Standing())
        version = case.version
        found = route(
            self._trust,
            passed=standing.passed,
            version_passed=version in standing.versions,
            under_way=standing.under_way.get(version, 0) > 0,
            interruptible=case.interruptible,
            draw=self._draw(),
        )
        if case.foreign and not self._trust.off:
            # Whoever began it is not held to it, and may hand over what they like: what comes of it is looked at.
            found = "first"
        if found == "first":
            standing.under_way[version] = standing.under_way.get(version, 0) + 1
        elif found == "wait":
            standing.waiting.setdefault(version, []).append(case)
        return found

    def settled(self, case: Case, first: bool, audit: Audit, *, scored: bool = True) -> list[Case]:
        """An audit is over: those that waited for it, to be received again. Not `scored`: of its rewards nothing is
        known, so that it speaks for no other group."""
        standing = self._nodes.setdefault(case.node, _Standing())
        version = case.version
        if audit.verdict == "passed":
            standing.passed += 1
        if audit.clean and scored and not case.foreign:
            standing.versions.add(version)
        if first:
            standing.under_way[version] -= 1
        return standing.waiting.pop(version, [])

    def banish(self, nodes: Iterable[str]) -> list[str]:
        """Take nothing more of these; their work items that waited here and are forgotten."""
        gone: list[str] = []
        for node in set(nodes) - self._banished:
            self._banished.add(node)
            standing = self._nodes.pop(node, None)
            if standing is not None:
                gone += [c.group.work_item for cases in standing.waiting.values() for c in cases]
        return gone
