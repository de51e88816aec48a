"""Acts on what a machine that we hold is worth: bids raised and lowered, price increases accepted, ends announced.

Invariant: a bid or an increase is within the user's cap, the machine's own on-demand price and what the machine is
worth; a new rate counts, and is told, once the provider has accepted it, and each that it accepts is sent once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import activation, bids, money, sight
from app.fleet.core import Core
from app.fleet.leases import Leases
from app.fleet.market import Market
from app.fleet.nodes import Nodes
from app.fleet.purse import Room
from app.protocol.base import usd
from app.storage.models import Lease
from providers.base import Announcing, Billing, ProviderError

log = logging.getLogger(__name__)

LAST_S = 60.0
"""So long before its host ends it, a machine is drained: what it has made is handed in."""


class Bidding:
    """Keeps machines that are worth it, and lets the others go in order."""

    def __init__(self, core: Core, leases: Leases, market: Market, nodes: Nodes) -> None:
        self.core = core
        self.nodes = nodes
        self.leases = leases
        self.market = market
        self.sent: dict[str, int] = {}
        """Lease → the rate that was sent and that no listing need show yet."""
        self._warned: set[str] = set()
        """Leases of which somebody was told that they will be over soon."""

    def outlook(self, lease: Lease) -> sight.Outlook:
        """What the market says of a machine that we hold."""
        if lease.billing != Billing.SPOT_BID:
            return sight.Outlook(known=True)
        usual = self.market.note_floor(lease)
        floor = usual.micros_h if usual.at > usual.since else None
        return sight.Outlook(floor, usual.known, self.market.on_demand(lease))

    def keep(self, lease: Lease, user: int | None, worth: int | None, room: Room, spare: int) -> Room:
        """Pay more for a machine that is worth it, `worth` micro-dollars per hour in all parts at most, and `spare`
        more than now. Returns the room that is left."""
        caps = bids.Caps(user, self.market.on_demand(lease) if lease.billing == Billing.SPOT_BID else None)
        asked = sight.keeping(lease, caps)
        if asked is None or lease.instance_id is None:
            # Endangered for another reason than its price, or nobody knows yet what was made: it stays as it is.
            return room
        if lease.billing == Billing.SPOT_BID:
            rest = sight.rest(lease, active=True)
            rate = bids.bid(asked, caps, None if worth is None else worth - rest)
        else:
            rate = asked
        more = 0 if rate is None else rate - lease.rate_micros_h
        if rate is None or more <= 0 or more > spare:
            return room
        if self.sent.get(lease.id) == rate or room.why_not(lease.provider, more):
            return room
        self.sent[lease.id] = rate
        if lease.billing == Billing.SPOT_BID:
            self.leases.spawn(self._bid(lease.id, lease.provider, lease.instance_id, rate, "raised", asked))
        else:
            self.leases.spawn(self._accept(lease.id, lease.provider, lease.announced_id or "", rate))
        return room.plus(lease.provider, more)

    def ease(self, lease: Lease, user: int | None) -> None:
        """Lower a bid that the floor has left behind: we pay what we bid."""
        if lease.billing != Billing.SPOT_BID or lease.instance_id is None:
            return
        caps = bids.Caps(user, self.market.on_demand(lease))
        bid = bids.lowered(lease.market_micros_h, lease.rate_micros_h, caps)
        if bid is None or self.sent.get(lease.id) == bid:
            return
        self.sent[lease.id] = bid
        floor = lease.market_micros_h
        self.leases.spawn(self._bid(lease.id, lease.provider, lease.instance_id, bid, "lowered", floor))

    def warn(self, session: AsyncSession, held: Sequence[Lease], running: Sequence[activation.Running]) -> None:
        """Tell once that a machine will be over soon."""
        for lease, seen in zip(held, running, strict=True):
            if not seen.ending:
                self._warned.discard(lease.id)
            elif lease.id not in self._warned:
                self._warned.add(lease.id)
                what = f"{lease.gpu_name} on machine {lease.machine_id} has to be replaced: {seen.ending}"
                self._emit(session, lease, "lease_endangered", what)

    async def end(self, session: AsyncSession, usable: Sequence[Lease], user: int | None) -> None:
        """Give a machine back in order right before its host ends it, or at once if it is billed above the user's cap,
        whether or not what takes its place works by now."""
        now = self.core.clock()
        for lease in usable:
            if lease.host_ends_at is not None and lease.host_ends_at - now < LAST_S:
                await self.nodes.retire(session, lease, "its host ends the contract now")
            elif user is not None and lease.rate_micros_h > user:
                why = f"billed ${usd(lease.rate_micros_h)}/h, above max_price_per_hour"
                await self.leases.cool_down(session, lease, why)
                await self.nodes.retire(session, lease, why)

    async def let_go(self, session: AsyncSession, lease: Lease, running: Sequence[activation.Running]) -> None:
        """A machine that others outbid us for is left alone for a while, longer each time."""
        priced_out = any(r.candidate.key == lease.id and (r.outbid or r.ending) for r in running)
        if priced_out and lease.billing == Billing.SPOT_BID and lease.market_micros_h > lease.rate_micros_h:
            await self.leases.cool_down(session, lease, f"outbid: its floor is ${usd(lease.market_micros_h)}/h")

    def _emit(self, session: AsyncSession, lease: Lease, kind: str, message: str) -> None:
        self.core.emit(session, lease.job_id, kind, message, lease=lease.id)

    def _failed(self, lease_id: str, rate: int) -> None:
        """The next round sends it again, unless another one is under way by now."""
        if self.sent.get(lease_id) == rate:
            del self.sent[lease_id]

    async def _bid(
        self, lease_id: str, provider: str, instance_id: str, rate: int, way: Literal["raised", "lowered"], floor: int
    ) -> None:
        try:
            await self.core.providers[provider].set_bid(instance_id, rate)
        except ProviderError as error:
            # A machine that is outbid meanwhile is replaced.
            self._failed(lease_id, rate)
            log.warning("bid for %s was not changed: %s", instance_id, error)
            return
        async with self.core.db.write() as session:
            lease = await session.get_one(Lease, lease_id)
            what = f"{lease.gpu_name}: bid {way} to ${usd(rate)}/h; the floor is ${usd(floor)}/h"
            self._emit(session, lease, f"bid_{way}", what)
            lease.agreed_micros_h = rate
            # Billed from here; the next listing may lag.
            money.change_rate(session, lease, rate, self.core.clock(), self.core.metrics)
        self.core.announce(lease.job_id)

    async def _accept(self, lease_id: str, provider: str, increase_id: str, rate: int) -> None:
        there = self.core.providers[provider]
        if not isinstance(there, Announcing):
            return
        try:
            await there.accept_increase(increase_id)
        except ProviderError as error:
            self._failed(lease_id, rate)
            log.warning("the price increase %s was not accepted: %s", increase_id, error)
            return
        async with self.core.db.write() as session:
            lease = await session.get_one(Lease, lease_id)
            what = f"{lease.gpu_name}: the host's new price of ${usd(rate)}/h is accepted; it is worth it"
            self._emit(session, lease, "price_increase_accepted", what)
            # The listing tells from when it holds.
            lease.agreed_micros_h = max(lease.agreed_micros_h, rate)
            lease.announced_micros_h = lease.announced_id = None
        self.core.announce(lease.job_id)
