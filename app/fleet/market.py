"""The market as a job sees it: offers of its providers, ranked by ρ, with every part of the price.

Invariant: an offer that the job may not rent is listed with the reason, not hidden; a spot price that arrived after
an offer was fetched overrides the offer's price.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import lives
from app.fleet.core import TOLD_S, Core
from app.fleet.priced import JobView, Known
from app.fleet.ranking import Ranking, rank
from app.storage.models import Cooldown, Lease, SpotPrice
from providers.base import Billing, Offer, OfferQuery, ProviderError, Transient

log = logging.getLogger(__name__)

USUAL_S = 3600.0
"""Prices are averaged over so long: a swing shorter than that is no saving."""
USUAL_KEPT = 50_000
CEILINGS_S = 300.0
"""On-demand prices, above which nobody bids, move slowly: read anew at this age."""


PATIENCE_S = 10.0
"""So long a look at the market waits for a provider."""
SEARCH_S = 120.0
"""A search that takes longer has failed."""


def matches(selector: dict[str, Any], *, machine_id: str, offer_id: str, gpu_name: str, region: str) -> bool:
    """Whether a spot-price selector means this machine: all given fields must match; `{}` matches everything."""
    kind = gpu_name.replace("_", " ")
    facts = {
        "machine_id": {machine_id},
        "offer_id": {offer_id},
        "gpu_name": {kind},
        # A cloud's machine is a type in a zone, `g5.xlarge/us-east-1a`.
        "instance_type": {kind, machine_id.partition("/")[0]},
        "region": {region, region.rstrip("abcdefghijklmnopqrstuvwxyz").removesuffix("-")},
        "zone": {region},
    }
    names = ("gpu_name", "instance_type")
    wanted = {k: str(v).replace("_", " ") if k in names else str(v) for k, v in selector.items() if v is not None}
    return all(v in facts[k] for k, v in wanted.items())


@dataclass(frozen=True, slots=True)
class Usual:
    """What a machine costs on average, micro-dollars per hour, since and at the last look."""

    micros_h: float
    since: float
    at: float

    @property
    def known(self) -> bool:
        """Whether it rests on as long a look as it averages over."""
        return self.at - self.since >= USUAL_S


@dataclass
class Shelf:
    """What one provider offered last."""

    offers: list[Offer] = field(default_factory=list)
    fetched_at: float = 0.0
    trouble: str = ""


class Market:
    """Keeps the offers of every provider."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._shelves: dict[tuple[str, Billing], Shelf] = {}
        self._usual: dict[tuple[str, Billing, str, int], Usual] = {}
        """By provider, billing, machine and number of GPUs: offers change their ids."""
        self.patience_s = PATIENCE_S
        self._searching: dict[tuple[str, bool], asyncio.Task[None]] = {}
        """Providers that are being asked, and whether for interruptible machines."""
        self._ceilings: dict[tuple[str, str, int], int] = {}
        """Rent on demand by provider, machine and number of GPUs, last known."""

    async def refresh(self, providers: Sequence[str], interruptible: bool, *, max_age_s: float) -> None:
        """Ask the providers whose offers are older than `max_age_s`, all at once. Trouble is kept, not raised.

        One that takes longer than `patience_s` is not waited for: its offers are there at a later look.
        """
        keys = [(name, interruptible) for name in providers if name in self.core.providers]
        for key in keys:
            if key not in self._searching:
                task = asyncio.create_task(self._refresh(*key, max_age_s))
                self._searching[key] = task
                task.add_done_callback(partial(self._searched, key))
        asked = {self._searching[key] for key in keys}
        if asked:
            await asyncio.wait(asked, timeout=self.patience_s)

    def _searched(self, key: tuple[str, bool], task: asyncio.Task[None]) -> None:
        self._searching.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the search at %s could not be finished", key[0], exc_info=error)

    async def aclose(self) -> None:
        """End the searches that are under way."""
        under_way = set(self._searching.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _refresh(self, name: str, interruptible: bool, max_age_s: float) -> None:
        billing = self.billing(name, interruptible)
        shelf, now = self._shelves.setdefault((name, billing), Shelf()), self.core.clock()
        if now - shelf.fetched_at < max_age_s:
            return
        try:
            offers = await self._search(name, OfferQuery(billing=billing, min_ports=0, limit=1000))
        except ProviderError as error:
            # Old offers are worse than none: somebody else may have them, at another price.
            shelf.offers, shelf.trouble, shelf.fetched_at = [], f"{error.code}: {error}", now
            log.warning("search at %s failed: %s", name, error)
            return
        shelf.offers, shelf.trouble, shelf.fetched_at = offers, "", now
        self._remember(offers, now)
        if billing is Billing.SPOT_BID:
            await self._refresh_ceilings(name, max(max_age_s, CEILINGS_S))

    async def _search(self, name: str, query: OfferQuery) -> list[Offer]:
        try:
            async with asyncio.timeout(SEARCH_S):
                return await self.core.providers[name].search(query)
        except TimeoutError as error:
            raise Transient(f"no offers within {SEARCH_S:.0f} s", provider=name) from error

    async def _refresh_ceilings(self, name: str, max_age_s: float) -> None:
        """What machines of a provider that takes bids cost on demand. Without an answer the last one stands."""
        shelf, now = self._shelves.setdefault((name, Billing.ON_DEMAND), Shelf()), self.core.clock()
        if now - shelf.fetched_at >= max_age_s:
            shelf.fetched_at = now
            try:
                query = OfferQuery(billing=Billing.ON_DEMAND, min_ports=0, limit=1000)
                shelf.offers = await self._search(name, query)
            except ProviderError as error:
                shelf.offers, shelf.trouble = [], f"{error.code}: {error}"
                log.warning("on-demand prices of %s can't be read: %s", name, error)
                return
            shelf.trouble = ""
        self._ceilings |= {_whole(o.provider, o.machine_id, o.num_gpus): o.compute_micros_h for o in shelf.offers}

    def on_demand(self, lease: Lease) -> int | None:
        """Rent of a lease's machine on demand, as far as it is known."""
        return self._ceilings.get(_whole(lease.provider, lease.machine_id, lease.num_gpus))

    def note_floor(self, lease: Lease) -> Usual:
        """Remember the floor of a machine that we hold, which no search shows; its usual one."""
        kind = (lease.provider, Billing(lease.billing), lease.machine_id, lease.num_gpus)
        self._usual[kind] = found = average(self._usual.get(kind), lease.market_micros_h, self.core.clock())
        return found

    def _remember(self, offers: Sequence[Offer], now: float) -> None:
        for offer in offers:
            before = self._usual.get(_kind(offer))
            self._usual[_kind(offer)] = average(before, offer.compute_micros_h, now)
        if len(self._usual) > USUAL_KEPT:
            self._usual = {k: u for k, u in self._usual.items() if now - u.at < USUAL_S}

    def _known(self, offers: Sequence[Offer], cooling: dict[tuple[str, str], str]) -> Known:
        usual, ceilings, barred = {}, {}, {}
        for row, offer in enumerate(offers):
            found = self._usual.get(_kind(offer))
            if found is not None and found.at > found.since:
                usual[row] = found.micros_h
            most = self._ceilings.get(_whole(offer.provider, offer.machine_id, offer.num_gpus))
            if most is not None and offer.billing is Billing.SPOT_BID:
                ceilings[row] = most
            why = cooling and (
                cooling.get((offer.provider, offer.machine_id))
                or cooling.get((offer.provider, family(offer.gpu_name, offer.region)))
            )
            if why:
                barred[row] = f"cooling down: {why}"
        return Known(usual, ceilings, barred)

    def billing(self, provider: str, interruptible: bool) -> Billing:
        """How machines of this provider are paid for such a job."""
        caps = self.core.providers[provider].caps
        return caps.spot_billing if interruptible and caps.spot else Billing.ON_DEMAND

    def troubles(self) -> dict[str, str]:
        """Provider → why its offers can't be had."""
        return {name: shelf.trouble for (name, _), shelf in self._shelves.items() if shelf.trouble}

    def forget(self, offer: Offer) -> None:
        """Take an offer off the shelf: it was just rented. A pool stays there."""
        shelf = self._shelves.get((offer.provider, offer.billing))
        if shelf is not None and not self.core.providers[offer.provider].caps.pools:
            shelf.offers = [o for o in shelf.offers if o.machine_id != offer.machine_id]

    async def informed(self, session: AsyncSession, view: JobView) -> JobView:
        """A job's view with what was seen of machines' lives, and of each provider what machines have to download there
        and whether its offers are pools."""
        image = self.core.settings.agent_image_gb * 1e9
        images = {name: image for name, p in self.core.providers.items() if p.caps.pulls_image}
        known = await lives.read(session, view.spec.fleet.interruptible, self.core.clock())
        pools = frozenset(name for name, p in self.core.providers.items() if p.caps.pools)
        return replace(view, lives=known, image_bytes=images, pools=pools)

    async def ranked(self, session: AsyncSession, view: JobView) -> Ranking:
        """All offers of the job's providers by ρ, those that it may not rent at the end."""
        names = view.spec.fleet.providers or list(self.core.providers)
        shelves = {
            name: self._shelves.get((name, self.billing(name, view.spec.fleet.interruptible)), Shelf())
            for name in names
            if name in self.core.providers
        }
        prices = await _newer_prices(session, {n: s.fetched_at for n, s in shelves.items() if s.offers})
        now = self.core.clock()
        cooling = {
            (c.provider, c.machine_id): c.reason
            for c in await session.scalars(select(Cooldown).where(Cooldown.until > now))
        }
        offers: list[Offer] = []
        for name, shelf in shelves.items():
            since = shelf.fetched_at - TOLD_S
            fresh = [row for row in prices if row.provider == name and row.received_at > since]
            offers += [_with_spot_price(offer, fresh) for offer in shelf.offers] if fresh else shelf.offers
        return rank(offers, view, self._known(offers, cooling))


async def _newer_prices(session: AsyncSession, fetched_at: Mapping[str, float]) -> list[SpotPrice]:
    """What was told since the offers of these providers were read, or shortly before, oldest first."""
    if not fetched_at:
        return []
    since = min(fetched_at.values()) - TOLD_S
    query = select(SpotPrice).where(SpotPrice.received_at > since, SpotPrice.provider.in_(list(fetched_at)))
    return list(await session.scalars(query.order_by(SpotPrice.id)))


def _with_spot_price(offer: Offer, prices: Sequence[SpotPrice]) -> Offer:
    if offer.billing is Billing.ON_DEMAND:
        return offer
    for row in prices:
        same = matches(
            row.selector,
            machine_id=offer.machine_id,
            offer_id=offer.offer_id,
            gpu_name=offer.gpu_name,
            region=offer.region,
        )
        if same:
            offer = replace(offer, compute_micros_h=row.micros_h)
    return offer


def average(before: Usual | None, micros_h: int, now: float) -> Usual:
    """The usual price after one more look: an exponential average over USUAL_S. Pure."""
    if before is None:
        return Usual(float(micros_h), now, now)
    share = 1 - math.exp(-max(0.0, now - before.at) / USUAL_S)
    return Usual(before.micros_h + share * (micros_h - before.micros_h), before.since, now)


def family(gpu_name: str, region: str) -> str:
    """Key of the cool-down of all machines with one card in one region: what a cloud's quotas count. A zone's letter
    is no part of its region (`us-east-1a`, `us-central1-a`)."""
    place = region.rstrip("abcdefghijklmnopqrstuvwxyz").removesuffix("-") if region[:1].islower() else region
    return f"gpu:{gpu_name.replace('_', ' ')}:{place}"


def _kind(offer: Offer) -> tuple[str, Billing, str, int]:
    return offer.provider, offer.billing, offer.machine_id, offer.num_gpus


def _whole(provider: str, machine_id: str, num_gpus: int) -> tuple[str, str, int]:
    return provider, machine_id, num_gpus
