"""RunPod's REST API v2 behind `providers.base.Provider`.

Invariant: a create is one POST, whatever happens to it, named by its label and on demand; RunPod has no idempotency key
and has been seen to make a pod and answer 500, so only a readable refusal counts as one.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx

from providers.base import (
    BadRequest,
    Balance,
    CapabilityError,
    Caps,
    Charge,
    Instance,
    InstanceNotFound,
    Listing,
    MalformedAnswer,
    Notice,
    Offer,
    OfferQuery,
    RateLimited,
    RentResult,
    RentSpec,
    Transient,
)

from . import parse
from .client import NOT_SENT, Http, OnRequest
from .errors import parse_object, problem, redact
from .payload import CLOUDS, check_billing, create_body
from .phases import GONE

log = logging.getLogger(__name__)
BASE_URL = "https://api.runpod.io"
LOGS_S = 5.0
MAX_TAIL = 5000
RELIABILITY = 0.99
_POD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MORE = ("nextCursor", "nextPageToken", "next_token", "next", "hasMore")
"""RunPod does not page its list today. If one of these names ever has a value, the list is not all."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class RunPod:
    """One RunPod account.

    `clouds` and `counts` say what is looked for: one request a search for each pair. RunPod publishes no reliability;
    `reliability` is what offers are said to have. `on_request(provider, call, outcome)` is told of each request: "ok",
    "unknown" or an error's code.
    """

    def __init__(
        self, name: str = "runpod", base_url: str = BASE_URL, api_key: str = "", *,
        clouds: Sequence[str] = CLOUDS, counts: Sequence[int] = (1,), reliability: float = RELIABILITY,
        transport: httpx.AsyncBaseTransport | None = None, clock: Callable[[], datetime] = _utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, on_request: OnRequest | None = None,
    ) -> None:  # fmt: skip
        if not clouds or not set(clouds) <= set(CLOUDS) or not counts or min(counts) < 1:
            raise BadRequest(f"clouds must be of {CLOUDS} and counts 1 or more")
        self._name = name
        self._clouds = tuple(clouds)
        self._counts = tuple(counts)
        self._reliability = reliability
        self._clock = clock
        self._http = Http(name, base_url, api_key, transport, on_request, sleep)

    def __repr__(self) -> str:
        return f"RunPod(name={self._name!r})"

    @property
    def name(self) -> str:
        """Name used in settings, leases and offers."""
        return self._name

    @property
    def caps(self) -> Caps:
        """On demand only, traffic is free. The account is prepaid, but API v2 does not tell what is left."""
        return Caps(spot=False, change_bid=False, bandwidth_billed=False, prepaid=False, pools=True)

    def _malformed(self, message: str, answer: Any) -> MalformedAnswer:
        return MalformedAnswer(message, provider=self._name, raw=redact(json.dumps(answer, default=str)))

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Offers that pass `query`, cheapest first. MalformedAnswer when not one row of an answer can be read."""
        check_billing(query.billing)
        found: builtins.list[Offer] = []
        for cloud in self._clouds:
            for count in self._counts:
                found += await self._catalog(cloud, count)
        wanted = [offer for offer in found if parse.passes(offer, query)]
        return sorted(wanted, key=lambda o: (o.compute_micros_h, o.offer_id))[: query.limit]

    async def _catalog(self, cloud: str, count: int) -> builtins.list[Offer]:
        params = {"include": "AVAILABILITY", "product": "POD", "cloud": cloud, "count": str(count)}
        now = self._clock()
        answer = await self._http.json("search", "/v2/catalog/gpus", params=params)
        rows = answer.get("gpus")
        if not isinstance(rows, list):
            raise self._malformed("search: no list of gpus", answer)
        found: builtins.list[Offer] = []
        bad: builtins.list[str] = []
        for row in rows:
            try:
                found += parse.offers(row, cloud, count, self._name, self._reliability, now)
            except parse.Unreadable as error:
                bad.append(str(error))
        if rows and len(bad) == len(rows):
            raise self._malformed(f"search: none of {len(rows)} cards can be read ({bad[0]})", rows[0])
        if bad:
            log.warning("%s: %d cards without a readable price, e.g. %s", self._name, len(bad), bad[0])
        return found

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One create request. Raises only for requests that must not be sent (BadRequest, CapabilityError)."""
        body = create_body(offer, spec)
        try:
            result = self._outcome(await self._http.send("create", "POST", "/v2/pods", body=body))
        except RateLimited as error:
            result = RentResult("refused", error=error)
        except NOT_SENT as error:
            unsent = Transient(f"create was not sent: {type(error).__name__} {error}", provider=self._name)
            result = RentResult("refused", error=unsent)
        except httpx.HTTPError as error:
            lost = Transient(f"create: {type(error).__name__} {error}", provider=self._name)
            result = RentResult("unknown", error=lost)
        code = result.error.code if result.error is not None else "ok"
        self._http.report("create", "unknown" if result.outcome == "unknown" else code)
        return result

    def _outcome(self, response: httpx.Response) -> RentResult:
        """What an answer to a create proves."""
        answer = parse_object(response.text)
        made = (answer or {}).get("id")
        made = made if isinstance(made, str) and _POD_ID.fullmatch(made) else None
        if response.is_success:
            if made is not None:
                return RentResult("created", instance_id=made)
            return RentResult("unknown", error=self._malformed("create: a success without a pod's id", answer))
        error = self._http.error("create", response)
        told = 400 <= response.status_code < 500 and problem(response.text) is not None
        if told or isinstance(error, RateLimited) or response.status_code == 401:
            return RentResult("refused", doomed_id=made, error=error)
        return RentResult("unknown", error=error)

    def _path(self, instance_id: str) -> str:
        if not _POD_ID.fullmatch(instance_id):
            raise BadRequest(f"{instance_id[:80]!r} is no pod's id", provider=self._name)
        return f"/v2/pods/{instance_id}"

    async def get(self, instance_id: str) -> Instance | None:
        """One pod; None for RunPod's own 404 and for a pod that is TERMINATED."""
        try:
            row = await self._http.json("show", self._path(instance_id))
        except InstanceNotFound:
            return None
        found = parse.pod(row, self._name)
        if found.instance_id != instance_id:
            raise self._malformed(f"show: asked for {instance_id}, got {found.instance_id}", {})
        return None if found.raw_status == GONE else found

    async def list(self) -> Listing:
        """All pods but those of RunPod's clusters, which this adapter never makes."""
        answer = await self._http.json("list", "/v2/pods")
        rows = answer.get("pods")
        if not isinstance(rows, list):
            raise self._malformed("list: no list of pods", sorted(answer))
        pods = [parse.pod(row, self._name) for row in rows]
        complete = not any(answer.get(name) for name in _MORE)
        return Listing(complete, tuple(pod for pod in pods if pod.raw_status != GONE))

    async def release(self, instance_id: str) -> None:
        """Terminate. RunPod's own 404 is success."""
        try:
            await self._http.exchange("destroy", "DELETE", self._path(instance_id))
        except InstanceNotFound:
            log.info("%s: pod %s was gone already", self._name, instance_id)

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """There are no bids."""
        raise CapabilityError("RunPod takes no bids: its machines have fixed prices", provider=self._name)

    async def logs(self, instance_id: str, tail: int) -> str:
        """The container's last lines; what came within five seconds, for RunPod keeps the stream open."""
        path = f"{self._path(instance_id)}/logs"
        wanted = max(1, min(tail, MAX_TAIL))
        lines: builtins.list[str] = []
        try:
            await self._http.turn("logs")
            async with asyncio.timeout(LOGS_S):
                await self._read_logs(path, wanted, lines)
        except TimeoutError:
            log.debug("%s: the log of %s is still open", self._name, instance_id)
        except httpx.HTTPError as error:
            raise Transient(f"logs: {type(error).__name__} {error}", provider=self._name) from error
        except InstanceNotFound:
            return ""
        return "\n".join(lines[-wanted:])

    async def _read_logs(self, path: str, wanted: int, lines: builtins.list[str]) -> None:
        params = {"source": "container", "tail": str(wanted)}
        headers = self._http.headers("text/event-stream")
        async with self._http.client.stream("GET", path, params=params, headers=headers) as response:
            if not response.is_success:
                await response.aread()
                raise self._http.error("logs", response)
            async for line in response.aiter_lines():
                event = parse_object(line.removeprefix("data:").strip()) if line.startswith("data:") else None
                if event is not None and isinstance(event.get("line"), str):
                    lines.append(event["line"])
                if len(lines) >= wanted:
                    return

    async def balance(self) -> Balance:
        """API v2 does not tell: a create answers 402 (CreditError) when the credit is used up."""
        raise CapabilityError("RunPod's API v2 does not tell the balance: see its console", provider=self._name)

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """The bill by pod and hour from the hour of `since` on. Labels are empty: RunPod's bill knows ids only."""
        begin = since.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        params = {"startTime": begin.isoformat().replace("+00:00", "Z"), "bucketSize": "hour"}
        answer = await self._http.json("charges", "/v2/billing/pods", params=params)
        records = answer.get("records")
        if not isinstance(records, list):
            raise self._malformed("charges: no list of records", sorted(answer))
        return parse.charges(records, self._name, since)

    async def notices(self) -> AsyncIterator[Notice]:
        """RunPod sends none: ends at once."""
        nothing: tuple[Notice, ...] = ()
        for notice in nothing:
            yield notice

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.client.aclose()
