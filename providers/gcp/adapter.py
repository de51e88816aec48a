"""Google Cloud's Spot VMs behind `providers.base.Provider`.

Invariant: a create is one insert whose name and request id come from its label, so that the same intent can't become
two machines; its id is known before it is sent and is never lost by waiting for the outcome.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from providers.base import (
    BadRequest,
    Balance,
    Billing,
    CapabilityError,
    Caps,
    Charge,
    Instance,
    InstanceNotFound,
    Listing,
    MalformedAnswer,
    NoCapacity,
    Notice,
    Offer,
    OfferQuery,
    ProviderError,
    QuotaError,
    RentResult,
    RentSpec,
)

from . import parse
from .client import ComputeCallError, ComputeClient, Operation
from .errors import classify
from .payload import Shape, check_billing, insert_body, instance_name, place_of, request_id
from .table import read_table

log = logging.getLogger(__name__)
OnRequest = Callable[[str, str, str], None]
SETTLE_S, POLL_S = 20.0, 2.0
"""How long a create waits for Google's word on capacity, which comes with the operation, not with the answer."""
MAX_PAGES = 200
OLD_PRICE_DAYS = 30
RELIABILITY = 0.95
_ID = re.compile(r"([a-z]+(?:-[a-z0-9]+)+-[a-z])/([a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)")


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Gcp:
    """One project. `shape` says how machines are made; `zones` empty means all of the table.

    Google publishes no reliability; `reliability` is what offers are said to have. `on_request(provider, call,
    outcome)` is told of each request: "ok", "unknown" or an error's code.
    """

    def __init__(
        self, client: ComputeClient, shape: Shape, name: str = "gcp", *, zones: Sequence[str] = (),
        prices_file: Path | None = None, reliability: float = RELIABILITY, clock: Callable[[], datetime] = _utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, settle_s: float = SETTLE_S,
        on_request: OnRequest | None = None,
    ) -> None:  # fmt: skip
        if not shape.boot_image or not 30 <= shape.max_run_s <= 120 * 86_400:
            raise BadRequest("give a boot_image, and a max_run_s of 30 seconds to 120 days")
        self._client = client
        self._shape = shape
        self._name = name
        self._table = read_table(prices_file)
        self._rows = [row for row in self._table.rows if not zones or row.zone in zones]
        self._reliability = reliability
        self._clock = clock
        self._sleep = sleep
        self._settle_s = settle_s
        self._on_request = on_request
        old = [row for row in self._rows if (clock().date() - row.as_of).days > OLD_PRICE_DAYS]
        if old:
            log.warning("%s: %d of %d listed spot prices are older than %d days, the oldest of %s: give a prices_file",
                        name, len(old), len(self._rows), OLD_PRICE_DAYS, min(row.as_of for row in old))  # fmt: skip

    def __repr__(self) -> str:
        return f"Gcp(name={self._name!r})"

    @property
    def name(self) -> str:
        """Name used in settings, leases and offers."""
        return self._name

    @property
    def caps(self) -> Caps:
        """Spot at the price in force, no bids, traffic out is billed, and the bill comes afterwards."""
        return Caps(
            spot=True,
            change_bid=False,
            bandwidth_billed=True,
            idempotency_key=True,
            list_page=500,
            prepaid=False,
            pulls_image=False,
            spot_billing=Billing.SPOT_MARKET,
            pools=True,
        )

    def _report(self, call: str, outcome: str) -> None:
        if self._on_request is not None:
            self._on_request(self._name, call, outcome)

    def _error(self, call: str, error: ComputeCallError, name: str = "") -> ProviderError:
        return classify(call, error.status, error.reason, str(error), name=name, provider=self._name)

    def _raise(self, call: str, error: ComputeCallError, name: str = "") -> ProviderError:
        typed = self._error(call, error, name)
        self._report(call, typed.code)
        return typed

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Rows of the table that pass `query`, cheapest first. Asks nobody: Google tells no stock."""
        check_billing(query.billing)
        now, run = self._clock(), self._shape.max_run_s
        found = [parse.offer(row, self._table, self._name, self._reliability, run, now) for row in self._rows]
        wanted = [one for one in found if parse.passes(one, query)]
        return sorted(wanted, key=lambda o: (o.compute_micros_h, o.offer_id))[: query.limit]

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One insert, then a short wait for its outcome. Raises only for requests that must not be sent."""
        body = insert_body(offer, spec, self._shape)
        zone, _ = place_of(offer.offer_id)
        instance_id = f"{zone}/{instance_name(spec.label)}"
        try:
            operation = await self._client.insert(zone, body, request_id(spec.label, "insert"))
        except ComputeCallError as error:
            result = await self._not_inserted(error, instance_id, spec.label)
        else:
            result = await self._settled(zone, operation, instance_id)
        code = result.error.code if result.error is not None else "ok"
        self._report("create", "unknown" if result.outcome == "unknown" else code)
        return result

    async def _not_inserted(self, error: ComputeCallError, instance_id: str, label: str) -> RentResult:
        typed = self._error("create", error)
        if error.status == 409:
            # The name comes from the label: what is there is what this intent asked for, if it says so itself.
            try:
                there = await self.get(instance_id)
            except ProviderError:
                return RentResult("unknown", error=typed)
            mine = there is not None and there.label == label
            return RentResult("created", instance_id=instance_id) if mine else RentResult("refused", error=typed)
        certain = not error.sent or (error.status is not None and 400 <= error.status < 500 and error.status != 408)
        return RentResult("refused" if certain else "unknown", error=typed)

    async def _settled(self, zone: str, operation: Operation, instance_id: str) -> RentResult:
        """The outcome as far as it comes in time; otherwise it counts as made, and lists show what became of it."""
        waited = 0.0
        while not operation.done and waited < self._settle_s:
            await self._sleep(POLL_S)
            waited += POLL_S
            try:
                operation = await self._client.operation(zone, operation.name)
            except ComputeCallError as error:
                log.warning("%s: the operation of %s could not be read: %s", self._name, instance_id, error)
                break
        if not operation.errors:
            return RentResult("created", instance_id=instance_id)
        code, message = operation.errors[0]
        typed = classify("create", 400, code, message, provider=self._name)
        # Google leaves nothing behind when there was no room; for other failures, make sure.
        doomed = None if isinstance(typed, NoCapacity | QuotaError) else instance_id
        return RentResult("refused", doomed_id=doomed, error=typed)

    def _split(self, instance_id: str) -> tuple[str, str]:
        found = _ID.fullmatch(instance_id)
        if found is None:
            raise BadRequest(f"{instance_id[:120]!r} is no ZONE/NAME of an instance", provider=self._name)
        return found[1], found[2]

    async def get(self, instance_id: str) -> Instance | None:
        """One instance; None only for a 404 that names it."""
        zone, name = self._split(instance_id)
        try:
            row = await self._client.get(zone, name)
        except ComputeCallError as error:
            typed = self._raise("show", error, name)
            if isinstance(typed, InstanceNotFound):
                return None
            raise typed from error
        self._report("show", "ok")
        found = parse.instance(row, self._table, self._name)
        if found.instance_id != instance_id:
            raise MalformedAnswer(f"show: asked for {instance_id}, got {found.instance_id}", provider=self._name)
        return found

    async def list(self) -> Listing:
        """All instances of the project in all zones. Not complete when Google could not ask some of them."""
        found: dict[str, Instance] = {}
        complete, token, seen = True, "", {""}
        for _ in range(MAX_PAGES):
            try:
                page = await self._client.aggregated_list(token)
            except ComputeCallError as error:
                raise self._raise("list", error) from error
            self._report("list", "ok")
            complete = complete and not page.holes
            for row in page.instances:
                one = parse.instance(row, self._table, self._name)
                found[one.instance_id] = one
            token = page.next_token
            if not token:
                return Listing(complete, tuple(found.values()))
            if token in seen:
                raise MalformedAnswer("list: a page token came twice", provider=self._name, raw=token)
            seen.add(token)
        raise MalformedAnswer(f"list: more than {MAX_PAGES} pages", provider=self._name)

    async def release(self, instance_id: str) -> None:
        """Delete, disk included. A 404 that names the instance is success."""
        zone, name = self._split(instance_id)
        try:
            await self._client.delete(zone, name, request_id(f"{instance_id}:{self._clock().isoformat()}", "delete"))
        except ComputeCallError as error:
            typed = self._raise("destroy", error, name)
            if not isinstance(typed, InstanceNotFound):
                raise typed from error
            log.info("%s: instance %s was gone already", self._name, instance_id)
            return
        self._report("destroy", "ok")

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """There are no bids."""
        raise CapabilityError("Google takes no bids: Spot VMs cost the price in force", provider=self._name)

    async def logs(self, instance_id: str, tail: int) -> str:
        """The last lines of the serial console, where startup scripts print; "" when it is gone."""
        zone, name = self._split(instance_id)
        try:
            text = await self._client.serial_output(zone, name)
        except ComputeCallError as error:
            typed = self._raise("logs", error, name)
            if isinstance(typed, InstanceNotFound):
                return ""
            raise typed from error
        lines: builtins.list[str] = text.splitlines()
        return "\n".join(lines[-max(1, tail) :])

    async def balance(self) -> Balance:
        """Google sends a bill afterwards."""
        raise CapabilityError("Google Cloud is billed afterwards: set a budget in its console", provider=self._name)

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """None: Google's bill is a BigQuery export, a day late."""
        return []

    async def notices(self) -> AsyncIterator[Notice]:
        """Preemption is told inside the machine only, 30 seconds before: ends at once."""
        nothing: tuple[Notice, ...] = ()
        for notice in nothing:
            yield notice

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()
