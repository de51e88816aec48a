"""vast.ai behind `providers.base.Provider`.

Invariant: a create is one PUT, whatever happens to it, and creates of one account go one after the other; the same
machine is never asked for twice on the strength of one look at the market.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from providers.base import (
    Balance,
    Caps,
    Charge,
    Instance,
    InstanceNotFound,
    Listing,
    MalformedAnswer,
    Notice,
    Offer,
    OfferGone,
    OfferQuery,
    PriceIncrease,
    ProviderError,
    RateLimited,
    RentResult,
    RentSpec,
    Transient,
)

from . import parse
from .client import NOT_SENT, Http, OnRequest
from .errors import malformed
from .limiter import INTERVALS_S, Intervals
from .outcome import outcome
from .payload import check_bid, create_body, search_body

log = logging.getLogger(__name__)
BASE_URL = "https://console.vast.ai"
PAGE = 25
MAX_PAGES = 400
CHARGES_PAGE = 500
LANE_S = 300.0
COOLDOWN_S = 60.0
LOG_TRIES, LOG_PAUSE_S = 30, 0.3


def _utc_now() -> datetime:
    return datetime.now(UTC)


class VastAI:
    """One vast.ai account, or the local marketplace under another name.

    `interval_scale` multiplies vast.ai's minimum intervals between calls (0 for the local marketplace) and the
    minute for which a machine once asked for is left alone. `on_request(provider, call, outcome)` is told of each
    request: "ok", "unknown" or an error's code.
    """

    def __init__(
        self, name: str = "vastai", base_url: str = BASE_URL, api_key: str = "", *,
        transport: httpx.AsyncBaseTransport | None = None, clock: Callable[[], datetime] = _utc_now,
        interval_scale: float = 1.0, verified_only: bool = True, pulls_image: bool = True,
        on_request: OnRequest | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._name = name
        self._base_url = base_url
        self._clock = clock
        self._sleep = sleep
        self._verified_only = verified_only
        self._pulls_image = pulls_image
        intervals = Intervals(interval_scale, monotonic, sleep)
        self._http = Http(name, base_url, api_key, transport, intervals, lambda: clock().timestamp(), on_request)
        self._release_each_s = INTERVALS_S["destroy"] * interval_scale
        self._lane = asyncio.Lock()
        self._cooldown = timedelta(seconds=COOLDOWN_S * interval_scale)
        self._asked: dict[str, datetime] = {}

    def __repr__(self) -> str:
        return f"VastAI(name={self._name!r})"

    @property
    def name(self) -> str:
        """Name used in settings, leases and offers."""
        return self._name

    @property
    def caps(self) -> Caps:
        """Interruptible by own bid, bids can change, traffic is billed, no notice, no idempotency key."""
        return Caps(
            spot=True, change_bid=True, bandwidth_billed=True, list_page=PAGE, pulls_image=self._pulls_image,
            release_each_s=self._release_each_s,
        )  # fmt: skip

    def _taken(self, offer: Offer) -> bool:
        """Whether we asked for the machine after, or shortly before, the offer was seen."""
        asked = self._asked.get(offer.machine_id)
        return asked is not None and offer.fetched_at <= asked + self._cooldown

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Offers that pass `query`. MalformedAnswer when not one row of an answer can be read."""
        body = search_body(query, self._verified_only)
        fetched = self._clock()
        answer = await self._http.json("search", "POST", "/api/v0/bundles/", body=body)
        rows = answer.get("offers")
        if not isinstance(rows, list):
            raise self._malformed("search: no list of offers", answer)
        found: list[tuple[Offer, bool]] = []
        reason = ""
        for row in rows:
            try:
                one = parse.offer(row, query.billing, self._name, fetched)
                found.append((one, parse.rentable(row, query, self._verified_only) and parse.passes(one, query)))
            except (parse.Unreadable, AttributeError) as error:
                reason = str(error)
        if rows and not found:
            raise self._malformed(f"search: none of {len(rows)} offers can be read ({reason})", rows[0])
        if reason:
            log.warning("%s: %d offers without a readable price, e.g. %s", self._name, len(rows) - len(found), reason)
        return [offer for offer, passed in found if passed and not self._taken(offer)]

    def _malformed(self, message: str, answer: Any) -> MalformedAnswer:
        return malformed(message, answer, self._name)

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One create request. Raises only for requests that must not be sent (BadRequest, CapabilityError)."""
        # Where the machine's own key (CONTAINER_API_KEY) is good: with it, a machine that nobody needs ends itself.
        body = create_body(offer, replace(spec, env={"VAST_URL": self._base_url, **spec.env}))
        try:
            async with asyncio.timeout(LANE_S):
                await self._lane.acquire()
        except TimeoutError:
            return self._refused(Transient("other creates of this account take too long", provider=self._name))
        try:
            if self._taken(offer):
                return self._refused(OfferGone(f"machine {offer.machine_id} was just asked for", provider=self._name))
            return await self._create(offer, body)
        finally:
            self._lane.release()

    def _refused(self, error: ProviderError) -> RentResult:
        return RentResult("refused", error=error)

    async def _create(self, offer: Offer, body: dict[str, Any]) -> RentResult:
        self._asked[offer.machine_id] = self._clock()
        try:
            response = await self._http.send("create", "PUT", f"/api/v0/asks/{offer.offer_id}/", body=body)
        except RateLimited as error:
            del self._asked[offer.machine_id]
            result = self._refused(error)
        except NOT_SENT as error:
            del self._asked[offer.machine_id]
            result = self._refused(Transient(f"create was not sent: {error}", provider=self._name))
        except httpx.HTTPError as error:
            lost = Transient(f"create: {type(error).__name__} {error}", provider=self._name)
            result = RentResult("unknown", error=lost)
        else:
            result = outcome(response, lambda: self._http.error("create", response), self._name)
            if isinstance(result.error, RateLimited):
                del self._asked[offer.machine_id]
        code = result.error.code if result.error is not None else "ok"
        self._http.report("create", "unknown" if result.outcome == "unknown" else code)
        return result

    async def get(self, instance_id: str) -> Instance | None:
        """One instance; None for `{"instances": null}` or 404 no_such_instance."""
        path = f"/api/v0/instances/{int(instance_id)}/"
        try:
            answer = await self._http.json("show", "GET", path, params={"owner": "me"})
        except InstanceNotFound:
            return None
        if "instances" not in answer:
            raise self._malformed("show: no instances", answer)
        row = answer["instances"]
        if row is None:
            return None
        found = parse.instance(row, self._name)
        if found.instance_id != str(int(instance_id)):
            raise self._malformed(f"show: asked for {instance_id}, got {found.instance_id}", answer)
        return found

    async def list(self) -> Listing:
        """All instances of the account. Any page that fails raises; fewer rows than announced are not complete."""
        found: dict[str, Instance] = {}
        least = 0
        tokens: set[str] = set()
        params = {"select_filters": "{}", "order_by": '[{"col": "id", "dir": "asc"}]', "limit": str(PAGE)}
        for _ in range(MAX_PAGES):
            answer = await self._http.json("list", "GET", "/api/v1/instances/", params=params)
            rows, token = answer.get("instances"), answer.get("next_token")
            if not isinstance(rows, list) or not (token is None or isinstance(token, str)):
                raise self._malformed("list: no list of instances", answer)
            for row in rows:
                one = parse.instance(row, self._name)
                found[one.instance_id] = one
            announced = answer.get("total_instances")
            if isinstance(announced, int):
                least = announced
            if not token:
                return Listing(complete=len(found) >= least, instances=tuple(found.values()))
            if token in tokens:
                raise self._malformed("list: a page token came twice", token)
            tokens.add(token)
            params["after_token"] = token
        raise self._malformed(f"list: more than {MAX_PAGES} pages", None)

    async def release(self, instance_id: str) -> None:
        """Destroy. "No such instance" is success; a bad key, which is a 404 too, raises AuthError."""
        try:
            await self._http.json("destroy", "DELETE", f"/api/v0/instances/{int(instance_id)}/", body={})
        except InstanceNotFound:
            log.info("%s: instance %s was gone already", self._name, instance_id)

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """Change the bid of an interruptible instance, dollars per hour for the whole instance."""
        check_bid(bid_micros_h, 4)
        body = {"client_id": "me", "price": parse.dollars(bid_micros_h)}
        await self._http.json("bid", "PUT", f"/api/v0/instances/bid_price/{int(instance_id)}/", body=body)

    async def price_increases(self) -> Sequence[PriceIncrease]:
        """What hosts want more for machines of ours, and wait for an answer."""
        answer = await self._http.json("increases", "GET", "/api/v0/instances/pending-price-increases/")
        rows = answer.get("pending_price_increases")
        if not isinstance(rows, list):
            raise self._malformed("price increases: no list", answer)
        return parse.increases(rows, self._name)

    async def accept_increase(self, increase_id: str) -> None:
        """Agree. BadRequest if it does not wait for an answer any more."""
        body = {"pending_price_increase_id": int(increase_id)}
        await self._http.json("accept", "PUT", "/api/v0/instances/accept-price-increase/", body=body)

    async def logs(self, instance_id: str, tail: int) -> str:
        """The last `tail` lines; "" when they did not become ready within nine seconds."""
        path = f"/api/v0/instances/request_logs/{int(instance_id)}/"
        answer = await self._http.json("logs", "PUT", path, body={"tail": str(tail)})
        url = answer.get("result_url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise self._malformed("logs: no result_url", answer)
        for _ in range(LOG_TRIES):
            try:
                response = await self._http.client.get(url)
            except httpx.HTTPError as error:
                raise Transient(f"logs: {type(error).__name__} {error}", provider=self._name) from error
            if response.is_success:
                return response.text
            if response.status_code not in (403, 404):
                raise self._http.error("logs", response)
            await self._sleep(LOG_PAUSE_S)
        return ""

    async def balance(self) -> Balance:
        """Credit left; AuthError when the key is bad."""
        answer = await self._http.json("user", "GET", "/api/v0/users/current")
        try:
            return Balance(credit_micros=parse.micros(parse.number(answer, "credit")))
        except parse.Unreadable as error:
            raise self._malformed(f"user: {error}", {"keys": sorted(answer)}) from error

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """The bill from the UTC day of `since` on, whole days, paged to the end."""
        window = {"gte": int(since.timestamp()), "lte": int(self._clock().timestamp())}
        filters = json.dumps({"day": window, "type": {"in": ["instance"]}})
        params = {"select_filters": filters, "format": "tree", "limit": str(CHARGES_PAGE), "latest_first": "false"}
        found: builtins.list[Charge] = []
        for _ in range(MAX_PAGES):
            answer = await self._http.json("charges", "GET", "/api/v0/charges/", params=params)
            rows, token = answer.get("results"), answer.get("next_token")
            if not isinstance(rows, list):
                raise self._malformed("charges: no list of results", answer)
            found += parse.charges(rows, self._name, since)
            if not token:
                return found
            if token == params.get("after_token"):
                raise self._malformed("charges: a page token came twice", token)
            params["after_token"] = str(token)
        raise self._malformed(f"charges: more than {MAX_PAGES} pages", None)

    async def notices(self) -> AsyncIterator[Notice]:
        """vast.ai sends none: ends at once."""
        nothing: tuple[Notice, ...] = ()
        for notice in nothing:
            yield notice

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.client.aclose()
