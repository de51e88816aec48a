"""Google Cloud's adapter in front of a Compute Engine in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from providers.base import Billing, Offer, OfferQuery, Provider, RentSpec
from providers.gcp import ComputeCallError, Gcp, InstancePage, Shape

from ..emulators.gcp import Cloud, FakeCompute
from .harness import UNKNOWN_GPU, Harness, Registered, rent_spec

SECRET = "jt_conformance_0123456789"
PRICES = f"""
[common]
disk_usd_gb_month = 0.1
egress_usd_gb = 0.12
[[machine]]
type = "g2-standard-8"
gpu_name = "L4"
num_gpus = 1
gpu_ram_mb = 23034
prices = [{{ region = "us-central1", zones = ["a", "b"], spot_usd_h = 0.336764, as_of = 2026-11-01 }}]
[[machine]]
type = "x9-standard-8"
gpu_name = "{UNKNOWN_GPU}"
num_gpus = 1
gpu_ram_mb = 23034
prices = [{{ region = "europe-west4", zones = ["c"], spot_usd_h = 0.5, as_of = 2026-11-01 }}]
"""


class _Garbled(FakeCompute):
    """Answers the next listing with a row that is no instance."""

    spoil = False

    async def aggregated_list(self, page_token: str) -> InstancePage:
        page = await super().aggregated_list(page_token)
        if self.spoil:
            self.spoil = False
            return InstancePage(({"kind": "compute#somethingElse"},), "")
        return page


class _Gcp:
    def __init__(self, folder: Path) -> None:
        self._cloud = Cloud()
        self._prices = folder / "prices.toml"
        self._prices.write_text(PRICES)
        self._client = _Garbled(self._cloud)
        self._provider = self._adapter(self._client)

    def _adapter(self, client: FakeCompute) -> Gcp:
        return Gcp(client, Shape("projects/p/global/images/family/f"), prices_file=self._prices)

    @property
    def provider(self) -> Provider:
        return self._provider

    @property
    def secret(self) -> str:
        return SECRET

    def with_wrong_key(self) -> Provider:
        return self._adapter(FakeCompute(self._cloud, authorised=False))

    def query(self) -> OfferQuery:
        return OfferQuery(Billing.SPOT_MARKET)

    def spec(self, offer: Offer, label: str) -> RentSpec:
        plain = rent_spec(offer, label)
        return RentSpec(plain.label, plain.image, plain.onstart, {"ECHO2_JOIN_TOKEN": SECRET}, plain.disk_gb)

    async def calls(self) -> int:
        return len(self._cloud.calls)

    async def creates(self) -> int:
        return len(self._cloud.inserts)

    async def create_tokens(self) -> Sequence[str]:
        return [token for _, _, token in self._cloud.inserts]

    async def ignore_filters(self) -> None:
        """The table of prices is ours: nobody else filters it."""

    async def garble_next_search(self) -> None:
        raise AssertionError("a search asks nobody")

    async def refuse_next_create(self) -> None:
        full = (
            "The zone 'projects/p/zones/us-central1-a' does not have enough resources available to fulfill the request."
        )
        self._cloud.stockouts.append(("ZONE_RESOURCE_POOL_EXHAUSTED", full))

    async def lose_next_create(self, *, created: bool) -> None:
        lost = ComputeCallError("ConnectionError", status=None)
        (self._cloud.lost if created else self._cloud.failures.setdefault("insert", [])).append(lost)

    async def hide_new(self) -> None:
        self._cloud.hide = True

    async def show_new(self) -> None:
        self._cloud.hide = False
        self._cloud.hidden.clear()

    async def truncate_next_listing(self) -> None:
        self._cloud.holes = ["zones/us-central1-a"]

    async def garble_next_listing(self) -> None:
        self._client.spoil = True

    def _key(self, instance_id: str) -> tuple[str, str]:
        zone, _, name = instance_id.partition("/")
        return zone, name

    async def vanish(self, instance_id: str) -> None:
        del self._cloud.instances[self._key(instance_id)]

    async def preempt(self, instance_id: str) -> None:
        self._cloud.instances[self._key(instance_id)]["status"] = "STOPPING"

    async def announce(self, instance_id: str) -> None:
        raise AssertionError(f"Google announces nothing to us, {instance_id} included")

    async def fail_releases(self, count: int) -> None:
        busy = [ComputeCallError("Internal error", status=503, reason="backendError") for _ in range(count)]
        self._cloud.failures.setdefault("delete", []).extend(busy)

    async def add_foreign(self, label: str) -> str:
        body = {"name": "web-1", "labels": {"team": label}, "machineType": "zones/z/machineTypes/e2-small"}
        self._cloud.make("us-east1-b", body)
        return "us-east1-b/web-1"


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncIterator[Harness]:
    """A project in memory."""
    yield _Gcp(folder)


REGISTERED = Registered(
    "gcp", open_harness,
    not_applicable={
        "test_search_raises_on_an_answer_that_can_t_be_read": "a search asks nobody",
        "test_spot_without_support_is_refused_before_any_call": "spot is all that is rented here",
        "test_a_notice_reaches_us": "Google tells preemption inside the machine only",
    },
)  # fmt: skip
