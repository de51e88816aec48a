"""RunPod's REST API v2, as much of it as an adapter uses, by its published schema.

Invariant: what the schema calls required is there in every answer, and unknown fields of a create are refused by name.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

FIELDS = {"name", "image", "gpu", "cloud", "dataCenterIds", "disk", "env", "args", "ports"}


def card(
    gpu_id: str, memory: int, secure: float, community: float, *, flags: tuple[bool, bool] = (True, True),
    centers: dict[str, str] | None = None, level: str = "HIGH", most: tuple[int, int] = (8, 2),
) -> dict[str, Any]:  # fmt: skip
    """A row of the catalogue."""
    row: dict[str, Any] = {
        "id": gpu_id, "name": gpu_id, "pool": None, "manufacturer": "NVIDIA", "memory": memory, "secure": flags[0],
        "community": flags[1], "price": {"secure": secure, "community": community},
        "maxCount": {"secure": most[0], "community": most[1]}, "availability": level,
    }  # fmt: skip
    if centers is not None:
        row["dataCenters"] = [{"id": k, "name": k, "availability": v} for k, v in centers.items()]
    return row


@dataclass
class RunPodEmulator:
    """One account. `faults` maps a call (search, create, list, show, …) to answers given instead, oldest first."""

    key: str
    cards: list[dict[str, Any]]
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[str, list[Response]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    billing: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    price_factor: float = 1.0
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v2/catalog/gpus", self._search),
                Route("/v2/pods", self._create, methods=["POST"]),
                Route("/v2/pods", self._list),
                Route("/v2/pods/{id}", self._destroy, methods=["DELETE"]),
                Route("/v2/pods/{id}", self._show),
                Route("/v2/pods/{id}/logs", self._logs),
                Route("/v2/billing/pods", self._billing),
            ]
        )

    def _enter(self, call: str, request: Request) -> Response | None:
        self.calls.append((call, request.url.path))
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return problem(401, "Unauthorized", "invalid bearer token")
        waiting = self.faults.get(call)
        return waiting.pop(0) if waiting else None

    async def _search(self, request: Request) -> Response:
        assert request.query_params["include"] == "AVAILABILITY"
        assert request.query_params["product"] == "POD"
        return self._enter("search", request) or JSONResponse({"gpus": self.cards})

    async def _create(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        refused = self._enter("create", request) or self._check(body)
        if refused is not None:
            return refused
        pod = self.make(body)
        return JSONResponse(pod, status_code=201)

    def _check(self, body: dict[str, Any]) -> Response | None:
        unknown = sorted(set(body) - FIELDS)
        if unknown:
            return problem(422, "Unprocessable Entity", "validation failed", [f"additional properties {unknown}"])
        if not isinstance(body.get("disk"), int) or not isinstance(body.get("env"), dict):
            return problem(422, "Unprocessable Entity", "validation failed", ["$.disk: integer, $.env: object"])
        if body["gpu"]["id"] not in {row["id"] for row in self.cards}:
            return problem(400, "Bad Request", "unknown gpu type")
        return None

    def make(self, body: dict[str, Any]) -> dict[str, Any]:
        """A pod, running at once."""
        gpu, cloud = body["gpu"], body.get("cloud", "SECURE")
        row = next(row for row in self.cards if row["id"] == gpu["id"])
        cost = row["price"][cloud.lower()] * gpu["count"] * self.price_factor
        pod_id = f"pod{next(self._ids):06d}"
        mapped = [
            {"private": int(port.split("/")[0]), "public": 40_000 + at, "type": port.split("/")[1], "ip": "203.0.113.7"}
            for at, port in enumerate(body.get("ports", []))
        ]
        self.pods[pod_id] = {
            "id": pod_id, "name": body["name"], "image": body["image"], "args": body.get("args", ""),
            "disk": body.get("disk", 50), "ports": body.get("ports", []), "env": body.get("env", {}), "registry": None,
            "status": "RUNNING", "actions": ["stop", "terminate"], "mounts": {}, "gpu": gpu, "cloud": cloud,
            "dataCenterId": (body.get("dataCenterIds") or [None])[0], "cudaVersion": "12.8",
            "ssh": {"proxy": None, "direct": None}, "template": None, "cost": round(cost, 6), "locked": False,
            "globalNetworking": {"enabled": False}, "runtime": {"uptime": 3, "ports": mapped},
            "createdAt": "2026-11-29T12:00:00Z", "startedAt": "2026-11-29T12:00:05Z",
        }  # fmt: skip
        return self.pods[pod_id]

    async def _list(self, request: Request) -> Response:
        return self._enter("list", request) or JSONResponse({"pods": list(self.pods.values())})

    async def _show(self, request: Request) -> Response:
        refused = self._enter("show", request)
        pod = self.pods.get(request.path_params["id"])
        return refused or (JSONResponse(pod) if pod else problem(404, "Not Found", "pod not found"))

    async def _destroy(self, request: Request) -> Response:
        refused = self._enter("destroy", request)
        if refused is not None:
            return refused
        if self.pods.pop(request.path_params["id"], None) is None:
            return problem(404, "Not Found", "pod not found")
        return Response(status_code=204)

    async def _logs(self, request: Request) -> Response:
        tail = int(request.query_params["tail"])
        events = [
            f"id: {at}\ndata: " + json.dumps({"ts": "2026-11-29T12:00:00Z", "source": "container", "line": line})
            for at, line in enumerate(self.log.splitlines()[-tail:])
        ]
        text = "\n\n".join(events) + "\n\n"
        return self._enter("logs", request) or Response(text, media_type="text/event-stream")

    async def _billing(self, request: Request) -> Response:
        assert request.query_params["bucketSize"] == "hour"
        return self._enter("charges", request) or JSONResponse({"records": self.billing, "metadata": {}})


def problem(
    status: int, title: str, detail: str, errors: list[str] | None = None, headers: dict[str, str] | None = None
) -> Response:
    """A problem document (RFC 9457), as RunPod writes its refusals."""
    body = {"title": title, "status": status, "detail": detail, **({"errors": errors} if errors else {})}
    return JSONResponse(body, status_code=status, headers=headers, media_type="application/problem+json")
