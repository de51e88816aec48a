"""EC2 spot behind `providers.base.Provider`.

Invariant: a create is one RunInstances whose token is made of the label, so that the same intent can't make two
machines. An instance that we just made and EC2 does not see yet is never taken for gone. Blocking calls of boto3 run in
threads and have timeouts of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from providers.base import (
    Balance,
    Billing,
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
    ProviderError,
    RentResult,
    RentSpec,
    Transient,
)

from . import events, parse
from .clients import Answer, Clients, make_clients
from .config import Ec2Config, load_types
from .errors import Failed, classify, leaves_nothing
from .payload import create_request

log = logging.getLogger(__name__)
MAX_PAGES = 400
PAGE = 100
FRESH_S = 120.0
"""For this long EC2 may not see an instance that it just made."""
FRESH_TRIES, FRESH_PAUSE_S = 5, 1.0
PRICE_AGE = timedelta(minutes=15)
POLL_S = 5
"""A message ends a wait at once; the end of the service has to wait for the rest of it."""
OnRequest = Callable[[str, str, str], None]


def _utc_now() -> datetime:
    return datetime.now(UTC)


class EC2Spot:
    """One AWS account in one region. `on_request(provider, call, outcome)` is told of each request."""

    def __init__(
        self, config: Ec2Config, name: str = "ec2", *, clients: Clients | None = None,
        clock: Callable[[], datetime] = _utc_now, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_request: OnRequest | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._name = name
        self._types = load_types(config)
        self._clients = clients if clients is not None else make_clients(config)
        self._clock = clock
        self._sleep = sleep
        self._on_request = on_request
        self._fresh: dict[str, datetime] = {}
        self._prices: dict[parse.Pool, tuple[int, datetime]] = {}

    def __repr__(self) -> str:
        return f"EC2Spot(name={self._name!r}, region={self._config.region!r})"

    @property
    def name(self) -> str:
        """Name used in settings, leases and offers."""
        return self._name

    @property
    def caps(self) -> Caps:
        """Spot at the price in force, no bids, two minutes' notice, idempotent creates, billed afterwards."""
        return Caps(
            spot=True, change_bid=False, bandwidth_billed=True, idempotency_key=True, notice_s=events.WARNING_S,
            list_page=PAGE, prepaid=False, pulls_image=False, spot_billing=Billing.SPOT_MARKET, pools=True,
        )  # fmt: skip

    def _report(self, call: str, outcome: str) -> None:
        if self._on_request is not None:
            self._on_request(self._name, call, outcome)

    def _typed(self, call: str, error: Exception) -> ProviderError:
        return classify(call, error, provider=self._name, secrets=self._config.secrets())

    def _malformed(self, message: str, answer: Any = "") -> MalformedAnswer:
        return MalformedAnswer(message, provider=self._name, raw=str(answer))

    async def _call(self, call: str, send: Callable[..., Answer], **arguments: Any) -> Answer:
        """One request; raises typed errors. Their cause is left out: it may hold what `classify` took out."""
        try:
            answer = await asyncio.to_thread(send, **arguments)
        except Failed as failure:
            error = self._typed(call, failure)
        else:
            self._report(call, "ok")
            return answer
        self._report(call, error.code)
        raise error

    async def _rows(self, call: str, send: Callable[..., Answer], key: str, **arguments: Any) -> list[Any]:
        """All pages of `key`. An answer without it raises: only an empty list means "none"."""
        found: list[Any] = []
        tokens: set[str] = set()
        for _ in range(MAX_PAGES):
            answer = await self._call(call, send, **arguments)
            rows, token = answer.get(key), answer.get("NextToken")
            if not isinstance(rows, list):
                raise self._malformed(f"{call}: no {key}", sorted(answer))
            found += rows
            if not token:
                return found
            if token in tokens:
                raise self._malformed(f"{call}: a page token came twice", token)
            tokens.add(token)
            arguments["NextToken"] = token
        raise self._malformed(f"{call}: more than {MAX_PAGES} pages")

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Spot pools (type and zone) at the price in force, cheapest first. CapabilityError for other billing.

        EC2's API has no on-demand prices, and a price is no promise of capacity.
        """
        if query.billing is not Billing.SPOT_MARKET:
            raise CapabilityError(f"the EC2 adapter has no {query.billing.value} offers: use spot_market")
        wanted = {parse.gpu_key(name) for name in query.gpu_names}
        types = [t.name for t in self._types.values() if not wanted or parse.gpu_key(t.gpu_name) in wanted]
        if not types:
            return []
        now = self._clock()
        rows = await self._rows(
            "search", self._clients.ec2.describe_spot_price_history, "SpotPriceHistory", InstanceTypes=types,
            ProductDescriptions=[self._config.product], StartTime=now, MaxResults=1000,
        )  # fmt: skip
        try:
            prices = parse.newest_prices(rows, self._types, self._config.product)
        except parse.Unreadable as error:
            raise self._malformed(f"search: {error}", rows[:1]) from error
        self._prices.update({pool: (price, now) for pool, price in prices.items()})
        offers = [
            parse.offer(pool, price, self._types[pool[0]], self._config, self._name, now)
            for pool, price in sorted(prices.items(), key=lambda item: (item[1], item[0]))
        ]
        return [offer for offer in offers if parse.passes(offer, query, self._config)][: query.limit]

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One create request. Raises only for requests that must not be sent (BadRequest, CapabilityError)."""
        request = create_request(offer, spec, self._config)
        try:
            answer = await asyncio.to_thread(self._clients.ec2.run_instances, **request)
        except Failed as failure:
            error = self._typed("create", failure)
            refused = leaves_nothing(failure)
            self._report("create", error.code if refused else "unknown")
            return RentResult("refused" if refused else "unknown", error=error)
        made = answer.get("Instances")
        if not isinstance(made, list) or len(made) != 1 or not isinstance(made[0].get("InstanceId"), str):
            self._report("create", "unknown")
            return RentResult("unknown", error=self._malformed("create: an answer without one instance"))
        self._report("create", "ok")
        instance_id: str = made[0]["InstanceId"]
        self._fresh[instance_id] = self._clock()
        return RentResult("created", instance_id=instance_id)

    def _is_fresh(self, instance_id: str) -> bool:
        """Whether we made it and EC2 may not see it yet."""
        made = self._fresh.get(instance_id)
        return made is not None and self._clock() - made < timedelta(seconds=FRESH_S)

    def _instance(self, row: Any) -> Instance:
        address = self._config.ipv4_micros_h if self._config.public_ip else 0
        oldest = self._clock() - PRICE_AGE
        rates = {pool: price + address for pool, (price, at) in self._prices.items() if at >= oldest}
        found = parse.instance(row, self._types, rates, self._name)
        self._fresh.pop(found.instance_id, None)
        return found

    async def _describe(self, **arguments: Any) -> list[Any]:
        rows: list[Any] = []
        for group in await self._rows("list", self._clients.ec2.describe_instances, "Reservations", **arguments):
            inside = group.get("Instances") if isinstance(group, dict) else None
            if not isinstance(inside, list):
                raise self._malformed("list: a reservation without instances", group)
            rows += inside
        return rows

    async def get(self, instance_id: str) -> Instance | None:
        """One instance; None when it is terminated or EC2 knows no such id.

        One that we just made and that EC2 does not see yet is asked for again; then Transient, not None.
        """
        for attempt in range(FRESH_TRIES):
            if attempt:
                await self._sleep(FRESH_PAUSE_S)
            try:
                rows = await self._describe(InstanceIds=[instance_id])
            except InstanceNotFound:
                rows = []
            if rows:
                found = self._instance(rows[0])
                if found.instance_id != instance_id:
                    raise self._malformed(f"get: asked for {instance_id}, got {found.instance_id}")
                return None if found.raw_status == "terminated" else found
            if not self._is_fresh(instance_id):
                return None
        raise Transient(f"EC2 does not see {instance_id} yet, it was just made", provider=self._name)

    async def list(self) -> Listing:
        """All instances that carry our label's tag, whoever's label it is. Any page that fails raises."""
        rows = await self._describe(
            Filters=[
                {"Name": "tag-key", "Values": [parse.LABEL_TAG]},
                {"Name": "instance-state-name", "Values": list(parse.LISTED_STATES)},
            ],
            MaxResults=PAGE,
        )
        return Listing(complete=True, instances=tuple(self._instance(row) for row in rows))

    async def release(self, instance_id: str) -> None:
        """Terminate. An unknown id is success, unless we made it a moment ago: then Transient, ask again."""
        try:
            answer = await self._call("destroy", self._clients.ec2.terminate_instances, InstanceIds=[instance_id])
        except InstanceNotFound:
            if self._is_fresh(instance_id):
                raise Transient(f"EC2 does not see {instance_id} yet, it was just made", provider=self._name) from None
            log.info("%s: instance %s was gone already", self._name, instance_id)
        else:
            ending = answer.get("TerminatingInstances")
            if not isinstance(ending, list) or instance_id not in [row.get("InstanceId") for row in ending]:
                raise self._malformed(f"destroy: the answer does not name {instance_id}", sorted(answer))
        self._fresh.pop(instance_id, None)

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """EC2 spot has no bids: always CapabilityError."""
        raise CapabilityError(f"EC2 spot has no bids: {instance_id} pays the price in force", provider=self._name)

    async def logs(self, instance_id: str, tail: int) -> str:
        """The last `tail` lines of the console; "" when EC2 has none yet."""
        answer = await self._call("logs", self._clients.ec2.get_console_output, InstanceId=instance_id, Latest=True)
        return "\n".join(str(answer.get("Output") or "").splitlines()[-tail:] if tail > 0 else [])

    async def balance(self) -> Balance:
        """AWS bills afterwards: always CapabilityError."""
        raise CapabilityError("AWS bills afterwards, there is no credit to tell", provider=self._name)

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """Always []: AWS's bill is a day late and does not name instances."""
        log.debug("%s: no bill since %s", self._name, since)
        return ()

    async def notices(self) -> AsyncIterator[Notice]:
        """Interruption warnings and rebalance recommendations of the queue, without end; none without a queue.

        A message is deleted once the caller asks for the next one, so that one who dies meanwhile sees it again.
        """
        sqs, url = self._clients.sqs, self._config.notice_queue_url
        while sqs is not None and url is not None:
            answer = await self._call(
                "notices", sqs.receive_message, QueueUrl=url, WaitTimeSeconds=POLL_S, MaxNumberOfMessages=10
            )
            for message in answer.get("Messages") or []:
                try:
                    found = events.notice(str(message.get("Body")), self._name)
                except ValueError as error:
                    log.warning("%s: a message of the queue can't be read and is deleted: %s", self._name, error)
                    found = None
                if found is not None:
                    yield found
                await self._call("notices", sqs.delete_message, QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    async def aclose(self) -> None:
        """Close connections."""
        self._clients.ec2.close()
        if self._clients.sqs is not None:
            self._clients.sqs.close()
