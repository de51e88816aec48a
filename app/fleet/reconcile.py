"""The provider's list against ours.

Invariant: only a complete listing proves that something is gone, and only in the second one in a row; an instance with
a label of this fleet that no live lease owns is destroyed; other labels are never touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import bids, increases, money, overdue
from app.fleet.core import TOLD_S, Core
from app.fleet.labels import label_prefix
from app.fleet.leases import COOLDOWN_S, UNFIT_S, Leases
from app.protocol.base import usd
from app.storage.models import Job, Lease, LeaseState, Node
from providers.base import Billing, Instance, Listing, Phase, ProviderError, Transient

log = logging.getLogger(__name__)

PRICE_TOLERANCE = 1.05
RATE_NEWS = 0.01
"""A rate that moves by less than this share is no news."""
LISTING_LAG_S = 20.0
"""A fresh instance may be missing from a listing for this long."""
LIST_S = 300.0
"""A list that takes longer counts as one that can't be read."""
WORDS = {
    Phase.PAUSED: "interrupted: stopped or outbid",
    Phase.FAILED: "the machine will not run",
    Phase.UNKNOWN: "the host is unreachable",
    Phase.TERMINATING: "its provider is ending it",
}


class Reconciler:
    """Holds listings against leases and writes down what they show."""

    def __init__(self, core: Core, leases: Leases) -> None:
        self.core = core
        self.leases = leases
        self.trouble: dict[str, str] = {}
        """Provider → why it can't be used now."""
        self.listing: set[str] = set()
        """Providers whose list is being read: what may be cut off at any moment."""
        self._strangers: dict[tuple[str, str], int] = {}
        """Provider and instance → in how many lists in a row it was nobody's."""
        self._told: set[tuple[str, str]] = set()
        """Lease and state that somebody was told of to be overdue."""

    async def run(self, provider: str) -> None:
        """One sweep over one provider: one list call, then one transaction."""
        with self.core.metrics.reconcile.time():
            asked_at = self.core.clock()
            try:
                listing = await self._list(provider)
            except ProviderError as error:
                self.trouble[provider] = f"{error.code}: {error}"
                log.warning("listing of %s failed: %s", provider, error)
                async with self.core.db.write() as session:
                    await self.leases.accounts.listed(session, provider, error)
                    await self._overdue(session, provider)
                return
            self.trouble.pop(provider, None)
            async with self.core.db.write() as session:
                await self.leases.accounts.listed(session, provider, None)
                strangers = await self._compare(session, provider, listing, asked_at)
                await self._overdue(session, provider)
            seen = {(provider, i.instance_id) for i in strangers}
            for key in [k for k in self._strangers if k[0] == provider and k not in seen]:
                del self._strangers[key]
            for instance in strangers:
                await self._destroy_stranger(provider, instance)
            await increases.follow(self.core, provider)

    async def _list(self, provider: str) -> Listing:
        self.listing.add(provider)
        try:
            async with asyncio.timeout(LIST_S):
                return await self.core.providers[provider].list()
        except TimeoutError as error:
            raise Transient(f"its list was not whole within {LIST_S:.0f} s", provider=provider) from error
        finally:
            self.listing.discard(provider)

    async def _overdue(self, session: AsyncSession, provider: str) -> None:
        """What no listing has moved on for too long: time alone ends it, or somebody has to know."""
        settings, trouble = self.core.settings, self.trouble.get(provider, "")
        limits = overdue.Limits(settings.settle_seconds, settings.join_timeout_seconds, self.core.started_at)
        rows = await session.scalars(
            select(Lease).where(Lease.provider == provider, Lease.state.in_([s for s in LeaseState if s.open]))
        )
        for lease in rows:
            found = overdue.judge(lease, self.core.clock(), limits)
            if found is None or lease.id in self.leases.creating:
                continue
            why = f"{found.why}; {provider}'s list can't be read: {trouble}" if trouble else found.why
            if found.give_up:
                await self._give_up(session, lease, why)
            elif (lease.id, lease.state) not in self._told:
                self._told.add((lease.id, lease.state))
                self.core.emit(session, lease.job_id, "lease_overdue", why, lease=lease.id)

    async def _compare(self, session: AsyncSession, provider: str, listing: Listing, asked_at: float) -> list[Instance]:
        prefix = label_prefix(self.core.settings.fleet_id)
        ours: dict[str, list[Instance]] = {}
        for one in listing.instances:
            if one.label.startswith(prefix):
                ours.setdefault(one.label, []).append(one)
        rows = list(await session.scalars(select(Lease).where(Lease.provider == provider, self._interesting(ours))))
        strangers: list[Instance] = []
        for lease in rows:
            found = ours.pop(lease.label, [])
            if lease.id in self.leases.creating or lease.created_at > asked_at:
                continue
            instance = _own(lease, found)
            strangers += [i for i in found if i is not instance]
            if instance is not None:
                await self._present(session, lease, instance, asked_at)
            elif listing.complete:
                await self._absent(session, lease, asked_at)
        return strangers + [i for found in ours.values() for i in found]

    @staticmethod
    def _interesting(ours: Mapping[str, object]) -> ColumnElement[bool]:
        return Lease.state.in_([s for s in LeaseState if s.open]) | Lease.label.in_(list(ours))

    async def _present(self, session: AsyncSession, lease: Lease, instance: Instance, asked_at: float) -> None:
        state = LeaseState(lease.state)
        lease.missing_lists = 0 if instance.phase is not Phase.UNKNOWN else lease.missing_lists + 1
        if state in (LeaseState.INTENT, LeaseState.UNKNOWN):
            self.leases.exists(session, lease, instance.instance_id)
            self.core.emit(
                session,
                lease.job_id,
                "lease_adopted",
                f"found instance {instance.instance_id} by its label",
                lease=lease.id,
            )
        elif not state.open or (state is LeaseState.RELEASING and (lease.ended_at or 0) < asked_at):
            self._still_there(session, lease, instance)
            self._billing(session, lease, instance)
            return
        planned = None if lease.gpu_running else self._planned(lease)
        self._billing(session, lease, instance)
        if not await self._as_planned(session, lease, instance, planned):
            return
        await self._phase(session, lease, instance)

    @staticmethod
    def _planned(lease: Lease) -> int:
        """The most that the GPU may cost by what we agreed to: the quote, or the highest bid that we may have sent."""
        if lease.billing == Billing.SPOT_BID:
            return max(lease.rate_micros_h, lease.agreed_micros_h, round(lease.market_micros_h * bids.MARGIN))
        return max(lease.quoted_micros_h, lease.agreed_micros_h)

    async def _as_planned(self, session: AsyncSession, lease: Lease, instance: Instance, planned: int | None) -> bool:
        """Whether it is paid in the mode and at the rate that were chosen; else it is given up. `planned` only before
        it ran: what a market does later is not a broken quote."""
        if lease.state == LeaseState.RELEASING:
            return True
        rate = instance.compute_micros_h if instance.phase is Phase.RUNNING else None
        why = ""
        if instance.billing is not None and instance.billing != lease.billing:
            why = f"rented as {lease.billing} but billed as {instance.billing.value}"
        elif planned is not None and rate is not None and rate > planned * PRICE_TOLERANCE:
            why = f"billed ${usd(rate)}/h but was quoted ${usd(planned)}/h"
        if why:
            await self._give_up(session, lease, why)
        return not why

    def _still_there(self, session: AsyncSession, lease: Lease, instance: Instance) -> None:
        """Released, and yet it is listed: it goes on costing until it is gone."""
        if lease.ended_at is not None and instance.phase is not Phase.TERMINATING:
            lease.disk_until, lease.gpu_until = lease.ended_at, lease.ended_at
            lease.ended_at = None
        if lease.exists_since is None:
            lease.exists_since = lease.disk_until = lease.created_at
        lease.instance_id = instance.instance_id
        if lease.state != LeaseState.RELEASING:
            lease.release_attempts = 0
            self.leases.move(lease, LeaseState.RELEASING, f"listed after it was {lease.state}: destroying it again")
            self.core.emit(session, lease.job_id, "lease_ghost", lease.reason, lease=lease.id)

    def _billing(self, session: AsyncSession, lease: Lease, instance: Instance) -> None:
        """Follow the provider's word on when and at what rate the GPU is paid."""
        now = self.core.clock()
        running = instance.phase is Phase.RUNNING
        rate = instance.compute_micros_h
        if instance.floor_micros_h is not None and now - self.core.told.get(lease.id, now - TOLD_S) >= TOLD_S:
            lease.market_micros_h = instance.floor_micros_h
        if instance.ends_at is not None:
            lease.host_ends_at = instance.ends_at.timestamp()
        if running and rate is not None:
            moved = abs(rate - lease.rate_micros_h) > RATE_NEWS * lease.rate_micros_h
            if moved and lease.gpu_running and lease.billing != Billing.SPOT_BID:
                what = f"{lease.gpu_name}: billed ${usd(rate)}/h instead of ${usd(lease.rate_micros_h)}/h"
                self.core.emit(session, lease.job_id, "rate_changed", what, lease=lease.id)
            money.change_rate(session, lease, rate, now, self.core.metrics)
        if running and not lease.gpu_running:
            started = instance.started_at.timestamp() if instance.started_at else now
            # A machine that resumes shows its first start again: nothing before the last entry is paid twice.
            lease.gpu_until = max(started, lease.gpu_until or 0.0)
            lease.gpu_since = lease.gpu_since or started
            lease.gpu_running = True
        elif not running and lease.gpu_running:
            money.close(session, lease, now, self.core.metrics)
            lease.gpu_running = False

    async def _phase(self, session: AsyncSession, lease: Lease, instance: Instance) -> None:
        if lease.state == LeaseState.RELEASING:
            return
        age, join_s = self.core.clock() - lease.created_at, self.core.settings.join_timeout_seconds
        if instance.phase is Phase.RUNNING:
            agreed = max(lease.quoted_micros_h, lease.agreed_micros_h)
            over = lease.billing == Billing.ON_DEMAND and lease.rate_micros_h > agreed * PRICE_TOLERANCE
            if over:
                quoted = usd(agreed)
                await self._give_up(session, lease, f"billed ${usd(lease.rate_micros_h)}/h but was quoted ${quoted}/h")
            elif lease.state == LeaseState.BOOTING and lease.phase is None and age > join_s:
                # What tells of its start is judged by that, with the other leases that are overdue.
                await self._give_up(session, lease, f"running, but its node did not join within {age:.0f} s")
        elif instance.phase in (Phase.PAUSED, Phase.FAILED, Phase.TERMINATING) or (
            instance.phase is Phase.UNKNOWN and lease.missing_lists >= 2
        ):
            await self._interrupted(session, lease, instance)
        elif instance.phase in (Phase.PENDING, Phase.LOADING) and lease.phase is None and age > join_s:
            await self._give_up(session, lease, f"did not start within {age:.0f} s ({instance.raw_status})")

    async def _give_up(self, session: AsyncSession, lease: Lease, reason: str, s: float = COOLDOWN_S) -> None:
        await self.leases.cool_down(session, lease, reason, s=s)
        self.leases.request_release(session, lease, reason)

    async def _interrupted(self, session: AsyncSession, lease: Lease, instance: Instance) -> None:
        node = (await session.scalars(select(Node).where(Node.lease_id == lease.id))).first()
        if node is not None and node.drain:
            # We asked it to end; that its machine is down now is no loss.
            self.leases.request_release(session, lease, lease.reason)
            return
        lease.interrupted = True
        job = (await session.scalars(select(Job).where(Job.id == lease.job_id))).one()
        job.preemptions += 1
        why = f"{WORDS[instance.phase]} ({instance.raw_status}) {instance.detail}".strip()
        self.core.emit(
            session, lease.job_id, "preempted", f"{lease.gpu_name} on machine {lease.machine_id}: {why}", lease=lease.id
        )
        unfit = instance.phase is Phase.FAILED and lease.join_token_used_at is None
        await self._give_up(session, lease, why, UNFIT_S if unfit else COOLDOWN_S)

    async def _absent(self, session: AsyncSession, lease: Lease, asked_at: float) -> None:
        """A list that was asked for at `asked_at` does not have it: of what happened since it says nothing."""
        state = LeaseState(lease.state)
        if state is LeaseState.RELEASING:
            if lease.ended_at is None and asked_at - lease.created_at <= LISTING_LAG_S:
                # Not destroyed yet, and too young for a listing to prove anything.
                return
            self.leases.released(session, lease, lease.reason)
        elif state in (LeaseState.INTENT, LeaseState.UNKNOWN):
            # Other create calls may have gone first: what counts is when this one became unclear.
            if asked_at - lease.state_since >= self.core.settings.settle_seconds:
                self.leases.move(lease, LeaseState.REFUSED, "never appeared at the provider")
                self.core.emit(
                    session, lease.job_id, "lease_refused", "the create call left nothing behind", lease=lease.id
                )
                await self.leases.cool_down(session, lease, "create call without outcome")
        elif asked_at - (lease.state_since if state is LeaseState.BOOTING else lease.created_at) > LISTING_LAG_S or (
            lease.gpu_since is not None
        ):
            lease.missing_lists += 1
            if lease.missing_lists >= 2:
                lease.interrupted = True
                if lease.gpu_since is None:
                    # No list has ever shown it at work: it may be one that the list forgets, and that costs.
                    await self._give_up(session, lease, "never seen at work in the provider's list: destroyed unseen")
                    return
                await self.leases.cool_down(session, lease, "vanished")
                self.leases.released(session, lease, "vanished from the provider's list")

    async def _destroy_stranger(self, provider: str, instance: Instance) -> None:
        """Our label, no lease of ours (left by a database that is gone), or not the machine of its lease (made twice).
        Seen twice, it is destroyed."""
        key = (provider, instance.instance_id)
        seen = self._strangers[key] = self._strangers.get(key, 0) + 1
        if seen < 2:
            return
        try:
            await self.core.providers[provider].release(instance.instance_id)
        except ProviderError as error:
            log.warning("orphan %s could not be destroyed: %s", instance.instance_id, error)
            return
        async with self.core.db.write() as session:
            self.core.emit(
                session, None, "orphan_destroyed", f"instance {instance.instance_id} ({instance.label}) had no lease"
            )


def _own(lease: Lease, found: Sequence[Instance]) -> Instance | None:
    """The machine of a lease among those that carry its label; another is its own only if it has none that lives."""
    same = next((i for i in found if i.instance_id == lease.instance_id), None)
    settled = lease.instance_id is not None and LeaseState(lease.state).usable
    return same if same is not None or settled or not found else found[0]
