"""vast.ai's adapter in front of the local marketplace."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from providers.base import Billing, Offer, OfferQuery, Provider, RentSpec
from providers.marketplace import MarketConfig, MarketServer
from providers.marketplace.config import DEFAULT_MACHINES
from providers.vastai import VastAI

from .harness import UNKNOWN_GPU, Harness, Registered, rent_spec
from .tamper import Wire, garble

KEY = "conformance-key-0123"
_LISTS, _SEARCHES = "/api/v1/instances", "/api/v0/bundles"
_KEPT = ("order", "type", "limit", "allocated_storage")


def _is(prefix: str, request: httpx.Request) -> bool:
    return request.url.path.startswith(prefix)


def _unfiltered(request: httpx.Request) -> httpx.Request | None:
    if not _is(_SEARCHES, request):
        return None
    body = {key: value for key, value in json.loads(request.content).items() if key in _KEPT}
    headers = {k: v for k, v in request.headers.items() if k.lower() != "content-length"}
    return httpx.Request(request.method, request.url, json=body, headers=headers, extensions=request.extensions)


class _Vast:
    def __init__(self, server: MarketServer, http: httpx.AsyncClient) -> None:
        self._server = server
        self._http = http
        self._wire = Wire(httpx.AsyncHTTPTransport())
        self._adapters: list[VastAI] = []
        self._foreign = 0
        self._hidden: set[int] | None = None
        self._wire.changes.append(self._lag)
        self._provider = self._adapter(KEY, self._wire)

    def _adapter(self, key: str, wire: Wire) -> VastAI:
        made = VastAI("marketplace", self._server.url, key, transport=wire, interval_scale=0)
        self._adapters.append(made)
        return made

    @property
    def provider(self) -> Provider:
        return self._provider

    @property
    def secret(self) -> str:
        return KEY

    def with_wrong_key(self) -> Provider:
        return self._adapter("wrong-key-0123", Wire(httpx.AsyncHTTPTransport()))

    def query(self) -> OfferQuery:
        return OfferQuery(Billing.SPOT_BID)

    def spec(self, offer: Offer, label: str) -> RentSpec:
        return rent_spec(offer, label)

    async def _control(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self._http.request(method, path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    async def _fault(self, call: str, kind: str, count: int = 1) -> None:
        await self._control("POST", "/_market/faults", {"call": call, "kind": kind, "count": count})

    async def calls(self) -> int:
        return len(self._wire.requests)

    async def creates(self) -> int:
        seen = (await self._control("GET", "/_market/requests"))["calls"]
        return int(seen.get("create", 0)) - self._foreign

    async def create_tokens(self) -> Sequence[str]:
        return ()

    async def ignore_filters(self) -> None:
        self._wire.rewrites.append(_unfiltered)

    async def garble_next_search(self) -> None:
        self._wire.once.append(garble(lambda request: _is(_SEARCHES, request)))

    async def refuse_next_create(self) -> None:
        await self._fault("create", "429")

    async def lose_next_create(self, *, created: bool) -> None:
        await self._fault("create", "drop_after_process" if created else "drop_before")

    def _lag(self, request: httpx.Request, answer: httpx.Response) -> httpx.Response | None:
        if self._hidden is None or not _is(_LISTS, request) or not answer.is_success:
            return None
        body = answer.json()
        rows = [row for row in body["instances"] if row["id"] in self._hidden]
        hidden = len(body["instances"]) - len(rows)
        total = body["total_instances"] - hidden
        return httpx.Response(200, json={**body, "instances": rows, "total_instances": total})

    async def hide_new(self) -> None:
        state = await self._control("GET", "/_market/state")
        self._hidden = {row["id"] for row in state["instances"]}

    async def show_new(self) -> None:
        self._hidden = None

    async def truncate_next_listing(self) -> None:
        await self._fault("list", "list_truncated")

    async def garble_next_listing(self) -> None:
        self._wire.once.append(garble(lambda request: _is(_LISTS, request)))

    async def vanish(self, instance_id: str) -> None:
        await self._control("DELETE", f"/api/v0/instances/{instance_id}/", {})

    async def preempt(self, instance_id: str) -> None:
        state = await self._control("GET", "/_market/state")
        machine = next(row["machine_id"] for row in state["instances"] if str(row["id"]) == instance_id)
        await self._control("POST", "/_market/price", {"selector": {"machine_id": machine}, "min_bid": "99"})

    async def announce(self, instance_id: str) -> None:
        raise AssertionError(f"vast.ai announces nothing, {instance_id} included")

    async def fail_releases(self, count: int) -> None:
        await self._fault("destroy", "500", count)

    async def add_foreign(self, label: str) -> str:
        offers = (await self._control("POST", "/api/v0/bundles/", {"type": "on-demand"}))["offers"]
        body = {"client_id": "me", "image": "img", "disk": 10.0, "label": label, "onstart": "sleep 600"}
        made = await self._control("PUT", f"/api/v0/asks/{offers[-1]['id']}/", body)
        self._foreign += 1
        return str(made["new_contract"])

    async def close(self) -> None:
        for adapter in self._adapters:
            await adapter.aclose()


def _machines(folder: Path) -> Path:
    """The price list with one card more, whose name no table knows."""
    text = DEFAULT_MACHINES.read_text()
    first = text.split("[[machine]]")[1]
    lines = [line for line in first.splitlines() if not line.startswith(("machine_id", "gpu_name"))]
    more = "\n".join(["[[machine]]", "machine_id = 9999", f'gpu_name = "{UNKNOWN_GPU}"', *lines])
    path = folder / "machines.toml"
    path.write_text(f"{text}\n{more}\n")
    return path


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncIterator[Harness]:
    """A marketplace on a free loopback port."""
    config = MarketConfig(
        folder / "market", KEY, control_enabled=True, start_delay_s=0.02, stop_grace_s=1.0, tick_s=0.02,
        machines_file=_machines(folder),
    )  # fmt: skip
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        MarketServer(config) as server,
        httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=30) as http,
    ):
        harness = _Vast(server, http)
        yield harness
        await harness.close()


REGISTERED = Registered(
    "vastai", open_harness,
    not_applicable={
        "test_a_create_carries_the_intent_s_token": "vast.ai has no idempotency key",
        "test_the_same_intent_sent_twice_is_one_machine": "vast.ai has no idempotency key",
        "test_spot_without_support_is_refused_before_any_call": "vast.ai has interruptible machines",
        "test_a_notice_reaches_us": "vast.ai sends no notices",
    },
)  # fmt: skip
