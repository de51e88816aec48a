"""The market as a job sees it: offers of its providers, ranked by ρ, with every part of the price.

Invariant: an offer that the job may not rent is listed with the reason, not hidden; a spot price that arrived after
an offer was fetched overrides the offer's price.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import pricing
from app.fleet.core import Core
from app.fleet.estimates import Estimate, Measurement, Workload, estimate, prior
from app.protocol.base import micros
from app.protocol.job import JobSpec
from app.storage.models import Cooldown, SpotPrice
from providers.base import Billing, Offer, OfferQuery, ProviderError

log = logging.getLogger(__name__)

MIN_LIFE_H = 0.5
USUAL_S = 3600.0
"""Prices are averaged over so long: a swing shorter than that is no saving."""
USUAL_KEPT = 50_000
LIFE_H = {True: 2.0, False: 6.0}
"""Expected hours of a lease, interruptible or not, until experience says otherwise."""


@dataclass(frozen=True, slots=True)
class Priced:
    """An offer with what it would cost and do for a job."""

    offer: Offer
    rate_micros_h: int
    price: pricing.Effective
    estimate: Estimate
    mu: float
    """Effective: times availability."""
    excluded: str = ""
    """Why the job may not rent it; empty if it may."""
    usual: int | None = None
    """`price.total` at what the machine cost over the last hour or so; None while it was seen only once."""

    @property
    def rho(self) -> float:
        """Dollars per hour for one rollout per second."""
        return pricing.rho(self.price.total, self.mu)


@dataclass(frozen=True, slots=True)
class JobView:
    """What ranking needs to know of a job."""

    spec: JobSpec
    load: Workload
    traffic: pricing.Traffic
    measured: tuple[Measurement, ...] = ()
    startup_s: float = 60.0


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

    async def refresh(self, providers: Sequence[str], interruptible: bool, *, max_age_s: float) -> None:
        """Ask the providers whose offers are older than `max_age_s`. Trouble is kept, not raised."""
        for name in providers:
            provider = self.core.providers.get(name)
            if provider is None:
                continue
            billing = self.billing(name, interruptible)
            shelf = self._shelves.setdefault((name, billing), Shelf())
            now = self.core.clock()
            if now - shelf.fetched_at < max_age_s:
                continue
            try:
                offers = await provider.search(OfferQuery(billing=billing, min_ports=0, limit=1000))
            except ProviderError as error:
                # Old offers are worse than none: somebody else may have them, at another price.
                shelf.offers, shelf.trouble, shelf.fetched_at = [], f"{error.code}: {error}", now
                log.warning("search at %s failed: %s", name, error)
                continue
            shelf.offers, shelf.trouble, shelf.fetched_at = offers, "", now
            self._remember(offers, now)

    def _remember(self, offers: Sequence[Offer], now: float) -> None:
        for offer in offers:
            before = self._usual.get(_kind(offer))
            self._usual[_kind(offer)] = average(before, offer.compute_micros_h, now)
        if len(self._usual) > USUAL_KEPT:
            self._usual = {k: u for k, u in self._usual.items() if now - u.at < USUAL_S}

    def _usual_price(self, offer: Offer) -> int | None:
        found = self._usual.get(_kind(offer))
        return round(found.micros_h) if found is not None and found.at > found.since else None

    def billing(self, provider: str, interruptible: bool) -> Billing:
        """How machines of this provider are paid for such a job."""
        caps = self.core.providers[provider].caps
        return caps.spot_billing if interruptible and caps.spot else Billing.ON_DEMAND

    def troubles(self) -> dict[str, str]:
        """Provider → why its offers can't be had."""
        return {name: shelf.trouble for (name, _), shelf in self._shelves.items() if shelf.trouble}

    def forget(self, offer: Offer) -> None:
        """Take an offer off the shelf: it was just rented, or refused."""
        shelf = self._shelves.get((offer.provider, offer.billing))
        if shelf is not None:
            shelf.offers = [o for o in shelf.offers if o.machine_id != offer.machine_id]

    async def ranked(self, session: AsyncSession, view: JobView) -> list[Priced]:
        """All offers of the job's providers by ρ, those that it may not rent at the end."""
        names = view.spec.fleet.providers or list(self.core.providers)
        prices = list(await session.scalars(select(SpotPrice).order_by(SpotPrice.id)))
        now = self.core.clock()
        cooling = {
            (c.provider, c.machine_id): c.reason
            for c in await session.scalars(select(Cooldown).where(Cooldown.until > now))
        }
        out, price = [], pricer(view)
        for name in names:
            if name not in self.core.providers:
                continue
            shelf = self._shelves.get((name, self.billing(name, view.spec.fleet.interruptible)), Shelf())
            for offer in shelf.offers:
                current = _with_spot_price(offer, prices)
                priced = price(current, self._usual_price(offer))
                cooled = cooling.get((name, offer.machine_id))
                out.append(replace(priced, excluded=f"cooling down: {cooled}") if cooled else priced)
        return sorted(out, key=lambda p: (bool(p.excluded), p.rho, p.offer.offer_id))


def _with_spot_price(offer: Offer, prices: Sequence[SpotPrice]) -> Offer:
    if offer.billing is not Billing.SPOT_BID:
        return offer
    for row in prices:
        fresh = row.received_at > offer.fetched_at.timestamp()
        same = row.provider == offer.provider and matches(
            row.selector,
            machine_id=offer.machine_id,
            offer_id=offer.offer_id,
            gpu_name=offer.gpu_name,
            region=offer.region,
        )
        if fresh and same:
            offer = replace(offer, compute_micros_h=row.micros_h)
    return offer


def average(before: Usual | None, micros_h: int, now: float) -> Usual:
    """The usual price after one more look: an exponential average over USUAL_S. Pure."""
    if before is None:
        return Usual(float(micros_h), now, now)
    share = 1 - math.exp(-max(0.0, now - before.at) / USUAL_S)
    return Usual(before.micros_h + share * (micros_h - before.micros_h), before.since, now)


def _kind(offer: Offer) -> tuple[str, Billing, str, int]:
    return offer.provider, offer.billing, offer.machine_id, offer.num_gpus


def pricer(view: JobView) -> Callable[..., Priced]:
    """`price_offer` for many offers of one look: what is the same for all is worked out once. Pure."""
    fleet = view.spec.fleet
    cap = micros(fleet.max_price_per_hour) if fleet.max_price_per_hour is not None else None
    disk_gb, traffic, startup_s = fleet.disk_gb, view.traffic, view.startup_s
    interruptible, longest = fleet.interruptible, LIFE_H[fleet.interruptible]
    guesses: dict[tuple[str, int], Estimate] = {}

    def price(offer: Offer, usual: int | None = None) -> Priced:
        kind = (offer.gpu_name, offer.num_gpus)
        guess = guesses.get(kind)
        if guess is None:
            guess = guesses[kind] = estimate(prior(*kind, view.load), offer.gpu_name, view.measured)
        spot = offer.billing is Billing.SPOT_BID
        rate = pricing.bid_for(offer.compute_micros_h, cap) if spot else offer.compute_micros_h
        full = pricing.effective_price(
            compute_micros_h=rate,
            disk_micros_gb_month=offer.disk_micros_gb_month,
            disk_gb=disk_gb,
            download_micros_gb=offer.download_micros_gb,
            upload_micros_gb=offer.upload_micros_gb,
            traffic=traffic,
            startup_s=startup_s,
            life_h=longest if offer.max_duration_s is None else min(longest, offer.max_duration_s / 3600),
        )
        mu = pricing.effective_throughput(guess.mu, offer.reliability, interruptible)
        lasting = None if usual is None else full.total + usual - offer.compute_micros_h
        return Priced(offer, rate, full, guess, mu, _excluded(offer, view.spec, rate, cap), lasting)

    return price


def price_offer(offer: Offer, view: JobView) -> Priced:
    """Effective price and throughput of an offer for a job, and whether the job's filters let it in. Pure."""
    return pricer(view)(offer)


def _excluded(offer: Offer, spec: JobSpec, rate: int, cap: int | None) -> str:
    fleet = spec.fleet
    if fleet.gpu_names and _plain(offer.gpu_name) not in map(_plain, fleet.gpu_names):
        return f"gpu_names does not name {offer.gpu_name}"
    if offer.reliability < fleet.min_reliability:
        return f"reliability {offer.reliability:.3f} < min_reliability {fleet.min_reliability}"
    if cap is not None and max(rate, offer.compute_micros_h) > cap:
        return f"over max_price_per_hour {fleet.max_price_per_hour}"
    if offer.max_duration_s is not None and offer.max_duration_s < MIN_LIFE_H * 3600:
        return "the host ends the contract too soon"
    return ""


def _plain(gpu_name: str) -> str:
    return gpu_name.replace("_", " ")
