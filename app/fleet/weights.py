"""What engines say of the weights that they hold, held together.

Invariant: only what engines of one kind say of one version is compared: others hold the same numbers in other forms.
What differs is told once for each word that brings it up, and changes nothing by itself: a checksum can differ without
a wrong number, by what an engine pads its parameters with. Known is what came since this process began: every heartbeat
repeats it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.protocol.node import Weights

BEHIND = 16
"""Versions; what is further behind what is told now is forgotten."""
MOST_JOBS = 256


@dataclass(frozen=True, slots=True)
class Difference:
    """Nodes whose engines hold something else under one version. `odd`: those that stand against a majority of at least
    two; empty where there is none."""

    version: int
    nodes: tuple[str, ...]
    odd: tuple[str, ...]

    @property
    def data(self) -> dict[str, Any]:
        """For programs."""
        return {"version": self.version, "nodes": list(self.nodes), "odd": list(self.odd)}

    @property
    def message(self) -> str:
        """For people."""
        if not self.odd:
            return f"engines of one kind hold different weights under version {self.version}: {', '.join(self.nodes)}"
        rest = len(self.nodes) - len(self.odd)
        return f"under version {self.version} {', '.join(self.odd)} holds other weights than {rest} engines of its kind"


def difference(said: Mapping[str, Weights], newest: Weights) -> Difference | None:
    """Hold what nodes say against each other, as far as it is of the version and kind of `newest`. Pure."""
    groups = defaultdict[str, list[str]](list)
    for node, weights in said.items():
        if (weights.version, weights.engine) == (newest.version, newest.engine):
            groups[weights.digest].append(node)
    if len(groups) < 2:
        return None
    most, second = sorted((len(nodes) for nodes in groups.values()), reverse=True)[:2]
    nodes = sorted(node for group in groups.values() for node in group)
    odd = sorted(node for group in groups.values() if len(group) < most for node in group)
    return Difference(newest.version, tuple(nodes), tuple(odd) if most > max(1, second) else ())


@dataclass(slots=True)
class Told:
    """By job and node, what was said last."""

    _jobs: dict[str, dict[str, Weights]] = field(default_factory=dict)

    def take(self, job_id: str, node_id: str, weights: Weights | None) -> Difference | None:
        """A node's word; a difference that it brings up, or keeps up in a new version."""
        if weights is None:
            return None
        said = self._jobs.setdefault(job_id, {})
        if said.get(node_id) == weights:
            return None
        said[node_id] = weights
        for other in [n for n, w in said.items() if w.version < weights.version - BEHIND]:
            del said[other]
        if len(self._jobs) > MOST_JOBS:
            del self._jobs[next(iter(self._jobs))]
        return difference(said, weights)
