"""RunPod's adapter in front of an emulation of its API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from starlette.responses import JSONResponse

from providers.base import Billing, Offer, OfferQuery, Provider, RentSpec
from providers.runpod import RunPod

from ..emulators.runpod import RunPodEmulator, card, problem
from .harness import UNKNOWN_GPU, Harness, Registered, rent_spec
from .tamper import Wire, cut, garble

KEY = "rpa_conformance0123456789"
_SEARCH, _PODS = "/v2/catalog/gpus", "/v2/pods"


def _cards() -> list[dict[str, object]]:
    return [
        card("NVIDIA GeForce RTX 4090", 24, 0.44, 0.31, centers={"US-KS-2": "HIGH", "EU-RO-1": "LOW"}),
        card("NVIDIA H100 80GB HBM3", 80, 2.99, 2.49, centers={"US-TX-3": "MEDIUM"}),
        card(f"NVIDIA GeForce {UNKNOWN_GPU}", 24, 0.5, 0.4),
    ]


class _RunPod:
    def __init__(self) -> None:
        self._api = RunPodEmulator(KEY, _cards())
        self._wire = Wire(httpx.ASGITransport(self._api.app))
        self._adapters: list[RunPod] = []
        self._hidden: set[str] | None = None
        self._wire.changes.append(self._lag)
        self._provider = self._adapter(KEY)

    def _adapter(self, key: str) -> RunPod:
        made = RunPod(base_url="http://127.0.0.1", api_key=key, transport=self._wire)
        self._adapters.append(made)
        return made

    @property
    def provider(self) -> Provider:
        return self._provider

    @property
    def secret(self) -> str:
        return KEY

    def with_wrong_key(self) -> Provider:
        return self._adapter("rpa_wrong")

    def query(self) -> OfferQuery:
        return OfferQuery(Billing.ON_DEMAND)

    def spec(self, offer: Offer, label: str) -> RentSpec:
        return rent_spec(offer, label)

    async def calls(self) -> int:
        return len(self._wire.requests)

    async def creates(self) -> int:
        return sum(r.method == "POST" and r.url.path == _PODS for r in self._wire.requests)

    async def create_tokens(self) -> Sequence[str]:
        return ()

    async def ignore_filters(self) -> None:
        """RunPod's catalogue knows no filters: it always answers with everything."""

    async def garble_next_search(self) -> None:
        self._wire.once.append(garble(lambda request: request.url.path == _SEARCH))

    async def refuse_next_create(self) -> None:
        full = "There are no longer any instances available with the requested specifications."
        self._api.faults.setdefault("create", []).append(problem(400, "Bad Request", full))

    async def lose_next_create(self, *, created: bool) -> None:
        """As RunPod does it when nothing was made, and by a broken connection when a pod was."""
        if created:
            self._wire.once.append(cut(lambda request: request.method == "POST" and request.url.path == _PODS))
        else:
            lost = problem(500, "Internal Server Error", "something went wrong")
            self._api.faults.setdefault("create", []).append(lost)

    def _lag(self, request: httpx.Request, answer: httpx.Response) -> httpx.Response | None:
        if self._hidden is None or request.method != "GET" or request.url.path != _PODS or not answer.is_success:
            return None
        return httpx.Response(200, json={"pods": [p for p in answer.json()["pods"] if p["id"] in self._hidden]})

    async def hide_new(self) -> None:
        self._hidden = set(self._api.pods)

    async def show_new(self) -> None:
        self._hidden = None

    async def truncate_next_listing(self) -> None:
        part = JSONResponse({"pods": [], "nextCursor": "abc"})
        self._api.faults.setdefault("list", []).append(part)

    async def garble_next_listing(self) -> None:
        self._wire.once.append(garble(lambda request: request.method == "GET" and request.url.path == _PODS))

    async def vanish(self, instance_id: str) -> None:
        del self._api.pods[instance_id]

    async def preempt(self, instance_id: str) -> None:
        self._api.pods[instance_id].update(status="EXITED", cost=0.0, runtime=None)

    async def announce(self, instance_id: str) -> None:
        raise AssertionError(f"RunPod announces nothing, {instance_id} included")

    async def fail_releases(self, count: int) -> None:
        busy = [problem(502, "Bad Gateway", "upstream failed") for _ in range(count)]
        self._api.faults.setdefault("destroy", []).extend(busy)

    async def add_foreign(self, label: str) -> str:
        body = {"name": label, "image": "img", "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1}}
        return str(self._api.make(body)["id"])

    async def close(self) -> None:
        for adapter in self._adapters:
            await adapter.aclose()


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncIterator[Harness]:
    """An emulator in this process."""
    harness = _RunPod()
    yield harness
    await harness.close()


REGISTERED = Registered(
    "runpod", open_harness,
    not_applicable={
        "test_a_create_carries_the_intent_s_token": "RunPod has no idempotency key",
        "test_the_same_intent_sent_twice_is_one_machine": "RunPod has no idempotency key",
        "test_a_notice_reaches_us": "RunPod sends no notices",
    },
)  # fmt: skip
