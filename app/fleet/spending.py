"""Between what the loop wants to rent and what may be paid: the job's budget, then the caps over all jobs.

Invariant: nothing is rented that the budget's promise, a cap or a provider's credit forbids; a job whose budget can't
pay for anything ends, one that a cap holds up waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import budget, money
from app.fleet.accounts import Accounts
from app.fleet.choice import Choice
from app.fleet.core import Core
from app.fleet.lifecycle import Lifecycle
from app.fleet.nodes import Nodes
from app.fleet.priced import Priced
from app.fleet.purse import Room
from app.fleet.roster import ENDING_DRAIN_S
from app.fleet.sight import Seen
from app.protocol.base import usd
from app.protocol.job import JobStatus
from app.storage.models import Lease, LeaseState


class Spending:
    """Says what of the loop's wishes can be paid."""

    def __init__(self, core: Core, accounts: Accounts, nodes: Nodes, lifecycle: Lifecycle) -> None:
        self.core = core
        self.accounts = accounts
        self.nodes = nodes
        self.lifecycle = lifecycle
        self._told: set[str] = set()
        """Jobs that were told that their budget stops them from renting."""

    def affordable(
        self,
        session: AsyncSession,
        seen: Seen,
        wanted: Sequence[Priced],
        others: Sequence[Priced],
        room: Room,
        sent: Mapping[str, int],
    ) -> tuple[list[Choice], Room]:
        """Of the wanted offers those that budget and caps allow, one after the other, and the room left beside them.
        A job without machines takes the first of `others` that it can pay, rather than none. `sent`: lease → a rate
        that was sent and is not billed yet."""
        exposure, choices, dear = self._exposure(seen, sent), list[Choice](), ""
        for p in wanted:
            if not self._pays(exposure, p):
                dear = _too_little(exposure, p)
                break
            if _why_not(room, p):
                continue
            exposure, room = _plus(exposure, p), _with(room, p)
            choices.append(_choice(p))
        if dear and not choices and not seen.usable:
            fit = (p for p in others if self._pays(exposure, p) and not _why_not(room, p))
            if (one := next(fit, None)) is not None:
                room, choices, dear = _with(room, one), [_choice(one)], ""
        if choices:
            self._told.discard(seen.job.id)
        if dear and seen.job.id not in self._told:
            self._told.add(seen.job.id)
            self.core.emit(session, seen.job.id, "budget_holds", dear)
        return choices, room

    def _pays(self, exposure: budget.Exposure, p: Priced) -> bool:
        least_s = self.core.settings.min_lease_seconds
        return budget.can_rent(exposure, p.price.total, least_s, p.price.start_download)

    def spare(self, seen: Seen, sent: Mapping[str, int]) -> int:
        """By how much the job's budget lets the rates of its machines rise together beyond those that were `sent`,
        micro-dollars per hour."""
        return budget.spare_rate(self._exposure(seen, sent), self.core.settings.min_lease_seconds)

    def _exposure(self, seen: Seen, sent: Mapping[str, int]) -> budget.Exposure:
        kept = self.core.wind_down_s(seen.leases)
        found = money.exposure(seen.job, seen.leases, self.core.clock(), kept, before=seen.before)
        rises = money.promised(seen.leases, sent)
        return replace(found, pending_micros_h=found.pending_micros_h + rises)

    def hold(
        self, session: AsyncSession, seen: Seen, wanted: Sequence[Priced], choices: Sequence[Choice], left: Room,
        short: bool,
    ) -> None:  # fmt: skip
        """Tell once that caps or credit keep a job short of nodes, and once that they don't any more."""
        # Of a pool there is always more.
        chosen = {
            (c.offer.provider, c.offer.offer_id)
            for c in choices
            if not self.core.providers[c.offer.provider].caps.pools
        }
        first = ""
        for p in wanted if short else ():
            if (p.offer.provider, p.offer.offer_id) not in chosen:
                why = _why_not(left, p)
                # An offer that could be had means that something else is waited for.
                first = (first or why) if why else ""
                if not why:
                    break
        self.accounts.hold(session, seen.job.id, first)

    def cannot_pay(self, session: AsyncSession, seen: Seen, offers: Sequence[Priced]) -> None:
        """Nothing runs: if the budget can't pay for any of these, the job is over."""
        if any(LeaseState(x.state).open for x in seen.leases):
            return
        settings, exposure = self.core.settings, self._exposure(seen, {})
        cheapest = min(offers, key=lambda p: p.price.total)
        if self._pays(exposure, cheapest):
            return
        hours = (settings.min_lease_seconds + settings.wind_down_seconds) / 3600
        need = cheapest.price.total * hours + cheapest.price.start_download
        reason = (
            f"the budget can't pay a node: ${usd(max(0, exposure.remaining))} is left, and "
            f"{cheapest.offer.gpu_name} needs "
            f"${usd(round(need))} to start, work and be given back"
        )
        outcome = JobStatus.BUDGET_EXHAUSTED if seen.job.step else JobStatus.FAILED
        self.lifecycle.end(session, seen.job, outcome, reason)

    async def give_back(self, session: AsyncSession, seen: Seen, room: Room) -> bool:
        """Keep the caps when money runs out or prices rise. True if the job has to give everything back."""
        margin_s = self.core.settings.tick_seconds * 3
        if room.used_up(margin_s):
            reason = f"max_usd_total {usd(room.exposure.budget)} is used up" if room.exposure else ""
            for lease in seen.usable:
                await self.nodes.retire(session, lease, reason)
            self._hurry(session, seen, reason)
            self.accounts.hold(session, seen.job.id, f"{reason}: everything is given back")
            return True
        await self._shed(session, seen, room)
        await self._leave_dry(session, seen, room, margin_s)
        return False

    def _hurry(self, session: AsyncSession, seen: Seen, reason: str) -> None:
        """Nobody goes on with what these nodes have begun: they are given no longer than at the end of a job."""
        for lease in seen.leases:
            node = seen.nodes.get(lease.id)
            leaving = node is not None and node.drain and LeaseState(lease.state).usable
            if leaving and node is not None and self.core.clock() - node.state_since > ENDING_DRAIN_S:
                self.nodes.leases.request_release(session, lease, reason)

    async def _shed(self, session: AsyncSession, seen: Seen, room: Room) -> None:
        """Give back the dearest of this job until what stays is within the cap per hour again."""
        excess = room.excess
        for lease in sorted(seen.usable, key=_dearest):
            if excess <= 0:
                break
            await self.nodes.retire(session, lease, f"prices rose above max_usd_per_hour {usd(room.per_hour or 0)}")
            excess -= lease.effective_micros_h

    async def _leave_dry(self, session: AsyncSession, seen: Seen, room: Room, margin_s: float) -> None:
        """Give back in order what a provider would stop for want of credit before it is looked at again."""
        settings = self.core.settings
        horizon = margin_s + self.core.wind_down_s(seen.leases) + settings.reconcile_seconds
        for lease in seen.usable:
            if room.dry(lease.provider, horizon):
                await self.nodes.retire(session, lease, f"the credit at {lease.provider} is nearly used up")


def _choice(p: Priced) -> Choice:
    price = p.price
    model = price.start_download - price.image_download
    return Choice(p.offer, p.rate_micros_h, price.total, p.mu, price.once, price.image_download, model)


def _why_not(room: Room, p: Priced) -> str:
    return room.why_not(p.offer.provider, p.price.total, p.price.start_download)


def _with(room: Room, p: Priced) -> Room:
    """The room beside that machine."""
    return room.plus(p.offer.provider, p.price.total, p.price.start_download)


def _plus(exposure: budget.Exposure, p: Priced) -> budget.Exposure:
    """With that machine rented."""
    return replace(
        exposure,
        pending_micros_h=exposure.pending_micros_h + p.price.total,
        unseen=exposure.unseen + p.price.start_download,
    )


def _too_little(exposure: budget.Exposure, p: Priced) -> str:
    return (
        f"renting stops: ${usd(max(0, exposure.remaining))} of the budget are not committed, too little for "
        f"{p.offer.gpu_name} at ${usd(p.price.total)}/h"
        + (f" and ${usd(p.price.start_download)} for what its start downloads" if p.price.start_download else "")
    )


def _dearest(lease: Lease) -> float:
    """Most dollars for what it makes first."""
    return -lease.effective_micros_h / max(lease.mu_prior, 1e-9)
