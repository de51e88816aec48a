"""Where a node pulls from, and what a source announces.

Invariant: an Announced owns the connection on which the leaves follow; who gets one reads it to its end or closes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from app.protocol.node import SnapshotUrls
from app.snapshots.connection import Connection

FetchUrls = Callable[[int, int, int], Awaitable[SnapshotUrls]]
"""(version, first chunk, count) → presigned URLs. May raise EchoError, httpx.HTTPError, TimeoutError."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where to pull from: base URL of a relay, empty for the object store."""

    kind: Literal["learner", "peer", "store"]
    url: str = ""
    node_id: str = ""

    @property
    def label(self) -> str:
        """For logs: the node's id, or `learner`, `store`."""
        return self.node_id or self.kind


@dataclass(frozen=True, slots=True)
class Announced:
    """A signed document, and the connection on which the version's leaves follow, if the relay sends them at once."""

    document: bytes
    stream: Connection | None = None
    delta: bytes = b""
    """The document of the delta that is offered instead of the whole version."""

    def close(self) -> None:
        """Do without the leaves that follow."""
        if self.stream is not None:
            self.stream.close()
