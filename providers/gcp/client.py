"""The six calls of Compute Engine that we use.

Invariant: every call is one request without a retry, with a deadline, and fails only with ComputeCallError. Instances
go both ways in the JSON form of Google's REST reference (camelCase; 64-bit numbers as strings).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = Mapping[str, Any]


class ComputeCallError(Exception):
    """A call failed. `status` is HTTP's, None without an answer; `reason` Google's word; not `sent`: surely never."""

    def __init__(self, message: str, *, status: int | None, reason: str = "", sent: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Operation:
    """Google's record of a change under way. `errors` are (code, message), there once it is `done`."""

    name: str
    done: bool
    errors: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class InstancePage:
    """One page of all zones. `holes` are the scopes that Google could not ask: the list is not all then."""

    instances: Sequence[Json]
    next_token: str
    holes: Sequence[str] = ()


class ComputeClient(Protocol):
    """Compute Engine for one project."""

    async def insert(self, zone: str, body: Json, request_id: str) -> Operation:
        """instances.insert. Sent again with the same `request_id`, Google makes nothing more."""
        ...

    async def operation(self, zone: str, name: str) -> Operation:
        """zoneOperations.get."""
        ...

    async def get(self, zone: str, name: str) -> Json:
        """instances.get."""
        ...

    async def aggregated_list(self, page_token: str) -> InstancePage:
        """instances.aggregatedList, one page; "" is the first."""
        ...

    async def delete(self, zone: str, name: str, request_id: str) -> Operation:
        """instances.delete."""
        ...

    async def serial_output(self, zone: str, name: str) -> str:
        """instances.getSerialPortOutput of port 1."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...
