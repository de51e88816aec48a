"""Compute Engine as a `ComputeClient` in memory.

Invariant: it keeps Google's rules that matter to us: a request id makes one thing once, names are unique in a zone,
names and labels have Google's letters, and an instance without room never appears.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from providers.gcp import ComputeCallError, InstancePage, Operation
from providers.gcp.client import Json

_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")


def gone(zone: str, name: str) -> ComputeCallError:
    """Google's 404 for an instance."""
    path = f"projects/p/zones/{zone}/instances/{name}"
    return ComputeCallError(f"The resource '{path}' was not found", status=404, reason="notFound")


@dataclass
class Cloud:
    """One project. `failures` maps a call to errors raised instead of doing it, oldest first."""

    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, list[ComputeCallError]] = field(default_factory=dict)
    lost: list[ComputeCallError] = field(default_factory=list)
    """Errors that an insert gives after it has made its machine."""
    stockouts: list[tuple[str, str]] = field(default_factory=list)
    """(code, message) with which the next inserts' operations fail."""
    pending_polls: int = 0
    """How many times an operation answers RUNNING before it is done."""
    holes: list[str] = field(default_factory=list)
    hidden: set[tuple[str, str]] = field(default_factory=set)
    hide: bool = False
    page: int = 2
    calls: list[str] = field(default_factory=list)
    inserts: list[tuple[str, Json, str]] = field(default_factory=list)
    done: dict[str, Operation] = field(default_factory=dict)
    results: dict[str, tuple[int, Operation]] = field(default_factory=dict)

    def make(self, zone: str, body: Json) -> dict[str, Any]:
        """An instance, running at once."""
        row = {
            **body, "zone": f"https://www.googleapis.com/compute/v1/projects/p/zones/{zone}", "status": "RUNNING",
            "lastStartTimestamp": "2026-11-29T04:00:00.000-08:00",
            "networkInterfaces": [{"accessConfigs": [{"natIP": "203.0.113.9"}]}],
        }  # fmt: skip
        self.instances[zone, str(body["name"])] = row
        if self.hide:
            self.hidden.add((zone, str(body["name"])))
        return row


class FakeCompute:
    """One user's client for the cloud. `authorised` False: every call is refused."""

    def __init__(self, cloud: Cloud, *, authorised: bool = True) -> None:
        self.cloud = cloud
        self.authorised = authorised

    def _enter(self, call: str) -> None:
        self.cloud.calls.append(call)
        if not self.authorised:
            raise ComputeCallError("Request had invalid authentication credentials.", status=401, reason="authError")
        waiting = self.cloud.failures.get(call)
        if waiting:
            raise waiting.pop(0)

    async def insert(self, zone: str, body: Json, request_id: str) -> Operation:
        self.cloud.inserts.append((zone, body, request_id))
        self._enter("insert")
        if request_id in self.cloud.done:
            return self.cloud.done[request_id]
        name = str(body["name"])
        if not _NAME.fullmatch(name) or not all(_LABEL.fullmatch(v) for v in body["labels"].values()):
            raise ComputeCallError("Invalid value for field 'resource'", status=400, reason="invalid")
        if (zone, name) in self.cloud.instances:
            message = f"The resource 'projects/p/zones/{zone}/instances/{name}' already exists"
            raise ComputeCallError(message, status=409, reason="alreadyExists")
        operation_name = f"operation-{len(self.cloud.inserts)}"
        if self.cloud.stockouts:
            result = Operation(operation_name, True, (self.cloud.stockouts.pop(0),))
        else:
            self.cloud.make(zone, body)
            result = Operation(operation_name, True)
        answer = Operation(operation_name, False) if self.cloud.pending_polls else result
        self.cloud.results[operation_name] = (self.cloud.pending_polls, result)
        self.cloud.done[request_id] = answer
        if self.cloud.lost:
            raise self.cloud.lost.pop(0)
        return answer

    async def operation(self, zone: str, name: str) -> Operation:
        self._enter("operation")
        left, result = self.cloud.results[name]
        self.cloud.results[name] = (left - 1, result)
        return result if left <= 1 else Operation(name, False)

    async def get(self, zone: str, name: str) -> Json:
        self._enter("get")
        if (zone, name) not in self.cloud.instances:
            raise gone(zone, name)
        return self.cloud.instances[zone, name]

    async def aggregated_list(self, page_token: str) -> InstancePage:
        self._enter("list")
        start = int(page_token or 0)
        rows = [row for key, row in self.cloud.instances.items() if key not in self.cloud.hidden]
        end = start + self.cloud.page
        holes, self.cloud.holes = self.cloud.holes, []
        return InstancePage(tuple(rows[start:end]), str(end) if end < len(rows) else "", tuple(holes))

    async def delete(self, zone: str, name: str, request_id: str) -> Operation:
        self._enter("delete")
        if self.cloud.instances.pop((zone, name), None) is None:
            raise gone(zone, name)
        return Operation("operation-delete", True)

    async def serial_output(self, zone: str, name: str) -> str:
        self._enter("serial")
        if (zone, name) not in self.cloud.instances:
            raise gone(zone, name)
        return "boot\nstartup-script: hello\nstartup-script: bye\n"

    async def aclose(self) -> None:
        """Nothing is open."""
