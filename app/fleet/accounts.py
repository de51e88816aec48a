"""Our accounts: whether each provider can be paid, and what all jobs together may still rent.

Invariant: a provider whose key is refused, whose credit is gone or whose list of instances can't be read rents nothing
until it answers well again, and says why; no other provider feels it. What a provider did not answer changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money
from app.fleet.budget import Exposure
from app.fleet.core import Core
from app.fleet.purse import Room
from app.protocol.base import micros, usd
from app.protocol.job import FINAL_STATUSES
from app.storage.models import OPEN_STATES, Job, Lease, LeaseState, Node
from providers.base import (
    AuthError,
    CapabilityError,
    CreditError,
    EndpointDeprecated,
    ProviderError,
    RateLimited,
    Transient,
)

log = logging.getLogger(__name__)

AGAIN_S = 600.0
"""A provider that refused a create call for want of credit, though its balance tells nothing of it, is left alone for
this long."""


ANSWER_S = 10.0
"""A round waits so long for a balance."""
LISTS_TOLERATED = 2
"""Listings in a row that may fail before nothing more is rented there."""
SHORT_WAIT_S = 15.0
"""Told to wait no longer than this, the next round may just ask again."""


@dataclass
class Standing:
    """What is known of an account."""

    checked_at: float | None = None
    credit: int | None = None
    unusable: str = ""
    until: float = 0.0
    """A refusal of a create call counts at least until then."""
    credit_then: int | None = None
    """The credit when it refused."""
    low: bool = False
    lists_failed: int = 0
    """Listings in a row that could not be read."""
    unlisted: str = ""
    """Why the last of them could not."""


class Accounts:
    """Looks at balances and answers what may be rented."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._standings = {name: Standing() for name in core.providers}

    def troubles(self) -> dict[str, str]:
        """Provider → why nothing is rented there."""
        out = {}
        for name, standing in self._standings.items():
            if standing.unusable:
                out[name] = standing.unusable
            elif standing.low and standing.credit is not None:
                out[name] = _low(standing.credit, self.core.settings.min_credit_hours)
            elif standing.lists_failed >= LISTS_TOLERATED:
                out[name] = f"its list of instances can't be read: {standing.unlisted}"
        return out

    async def listed(self, session: AsyncSession, name: str, error: ProviderError | None) -> None:
        """A look at the list of instances went well (None), or failed. What can't be seen can be neither settled nor
        verified: nothing is rented there until it can."""
        standing = self._standings[name]
        was = standing.lists_failed >= LISTS_TOLERATED
        if error is None:
            standing.lists_failed, standing.unlisted = 0, ""
            if was:
                await self._tell(session, name, "provider_listed", f"{name}: its list of instances can be read again")
            return
        # Whom the provider does not know, and what it has retired, is not a blip.
        certain = isinstance(error, AuthError | EndpointDeprecated)
        standing.lists_failed += LISTS_TOLERATED if certain else 1
        standing.unlisted = f"{error.code}: {error}"
        if not was and standing.lists_failed >= LISTS_TOLERATED:
            words = f"nothing is rented at {name}: its list of instances can't be read: {standing.unlisted}"
            await self._tell(session, name, "provider_unlisted", words)

    def credit(self, provider: str) -> int | None:
        """Micro-dollars left, where the provider tells."""
        return self._standings[provider].credit

    async def check(self) -> None:
        """Ask every provider whose balance is older than `reconcile_seconds`."""
        now, age = self.core.clock(), self.core.settings.reconcile_seconds
        due = [n for n, s in self._standings.items() if s.checked_at is None or now - s.checked_at >= age]
        for name in due:
            self._standings[name].checked_at = now
        answers = await asyncio.gather(*(self._ask(name) for name in due))
        if due:
            async with self.core.db.write() as session:
                room = await self.room(session)
                for name, answer in zip(due, answers, strict=True):
                    await self._judge(session, name, answer)
                    await self._judge_credit(session, name, room.burns.get(name, 0))

    async def _ask(self, name: str) -> int | ProviderError | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self.core.providers[name].balance()).credit_micros
        except CapabilityError:
            return None
        except TimeoutError:
            return Transient(f"no balance within {ANSWER_S:.0f} s", provider=name)
        except ProviderError as error:
            return error

    async def _judge(self, session: AsyncSession, name: str, answer: int | ProviderError | None) -> None:
        standing, why = self._standings[name], ""
        if isinstance(answer, AuthError | CreditError):
            why = _refusal(answer)
        elif isinstance(answer, ProviderError):
            log.warning("balance of %s: %s", name, answer)
            return
        else:
            standing.credit = answer
            if answer is not None and answer <= 0:
                why = f"no credit is left: ${usd(answer)}"
            topped_up = (answer or 0) > (standing.credit_then or 0) and standing.credit_then is not None
            if not why and self.core.clock() < standing.until and not topped_up:
                return
        await self._mark(session, name, why)

    async def _mark(self, session: AsyncSession, name: str, why: str) -> None:
        standing = self._standings[name]
        was, standing.unusable = standing.unusable, why
        if why and not was:
            await self._tell(session, name, "provider_unusable", f"nothing is rented at {name}: {why}")
        elif was and not why:
            standing.until, standing.credit_then = 0.0, None
            await self._tell(session, name, "provider_usable", f"{name} can be rented from again")

    async def _judge_credit(self, session: AsyncSession, name: str, burn: int) -> None:
        standing, hours = self._standings[name], self.core.settings.min_credit_hours
        low = standing.credit is not None and standing.credit < hours * burn
        if low and not standing.low and standing.credit is not None:
            words = f"{_low(standing.credit, hours)} at ${usd(burn)}/h: renting stops there"
            await self._tell(session, name, "provider_low_credit", f"{name}: {words}")
        elif standing.low and not low:
            await self._tell(session, name, "provider_credit_ok", f"{name}: there is credit enough again")
        standing.low = low

    async def refused(self, session: AsyncSession, provider: str, error: ProviderError | None) -> bool:
        """A create call was refused. True if that says something of the account, and nothing of the machine."""
        standing = self._standings[provider]
        if isinstance(error, RateLimited) and error.wait_s > SHORT_WAIT_S:
            standing.until, standing.credit_then = self.core.clock() + error.wait_s, None
            await self._mark(session, provider, f"it was asked too often and wants {error.wait_s:.0f} s of peace")
            return True
        if not isinstance(error, AuthError | CreditError):
            return False
        standing.until, standing.credit_then = self.core.clock() + AGAIN_S, standing.credit
        await self._mark(session, provider, _refusal(error))
        return True

    async def room(self, session: AsyncSession, bids: Mapping[str, int] | None = None) -> Room:
        """What may still be rented over all jobs. `bids`: lease → a bid that was sent and is not listed yet."""
        settings = self.core.settings
        leases = list(await session.scalars(select(Lease).where(Lease.state.in_(OPEN_STATES))))
        leaving_nodes = select(Node.lease_id).where(Node.drain.is_(True), Node.lease_id.in_([x.id for x in leases]))
        draining = set(await session.scalars(leaving_nodes))
        burns: dict[str, int] = {}
        staying = 0
        for lease in leases:
            price = lease.effective_micros_h + money.promised([lease], bids or {})
            burns[lease.provider] = burns.get(lease.provider, 0) + price
            leaving = lease.release_wanted or lease.state == LeaseState.RELEASING or lease.id in draining
            staying += 0 if leaving else price
        total = settings.max_usd_total
        return Room(
            burns=burns,
            staying_micros_h=staying,
            exposure=None if total is None else await self._exposure(session, leases, bids or {}, micros(total)),
            per_hour=None if settings.max_usd_per_hour is None else micros(settings.max_usd_per_hour),
            minimum_s=settings.min_lease_seconds,
            closed=self.troubles(),
            credit={n: s.credit for n, s in self._standings.items() if s.credit is not None},
            credit_hours=settings.min_credit_hours,
        )

    async def _exposure(
        self, session: AsyncSession, leases: list[Lease], bids: Mapping[str, int], cap: int
    ) -> Exposure:
        spent = Lease.spent_gpu + Lease.spent_disk + Lease.spent_download + Lease.spent_upload
        now, wind_down, closed = self.core.clock(), self.core.wind_down_s(leases), Lease.state.not_in(OPEN_STATES)
        before = int(await session.scalar(select(func.sum(spent)).where(closed)) or 0)
        late = (Lease.image_micros > 0) & (Lease.ended_at > now - money.BILL_LATE_S)
        awaited = list(await session.scalars(select(Lease).where(closed, late)))
        before -= money.total_spent(awaited, now)
        found = money.exposure_of([*leases, *awaited], now, budget=cap, before=before, wind_down_s=wind_down)
        return replace(found, pending_micros_h=found.pending_micros_h + money.promised(leases, bids))

    def hold(self, session: AsyncSession, job_id: str, why: str) -> None:
        """Renting for this job is held up, or (empty) is not any more: told once each."""
        was = self.core.held.get(job_id)
        if why:
            self.core.held[job_id] = why
            if was is None:
                self.core.emit(session, job_id, "renting_held", f"renting stops: {why}")
        elif was is not None:
            del self.core.held[job_id]
            self.core.emit(session, job_id, "renting_free", "there is room to rent again")

    def view(self, room: Room) -> dict[str, Any]:
        """The caps and what counts against them."""
        exposure = room.exposure
        return {
            "usd_per_hour": usd(room.burn),
            "max_usd_per_hour": None if room.per_hour is None else usd(room.per_hour),
            "committed_usd": None if exposure is None else usd(exposure.committed),
            "max_usd_total": None if exposure is None else usd(exposure.budget),
            "held": [{"job_id": job_id, "reason": why} for job_id, why in sorted(self.core.held.items())],
        }

    async def _tell(self, session: AsyncSession, provider: str, kind: str, message: str) -> None:
        """To every job that may rent there; to the log alone when there is none."""
        jobs = await session.scalars(select(Job).where(Job.status.not_in(list(FINAL_STATUSES))))
        concerned = [j.id for j in jobs if not j.spec["fleet"]["providers"] or provider in j.spec["fleet"]["providers"]]
        targets: list[str | None] = [*concerned] or [None]
        for job_id in targets:
            self.core.emit(session, job_id, kind, message, provider=provider)


def _refusal(error: AuthError | CreditError) -> str:
    what = "its key is refused" if isinstance(error, AuthError) else "no credit"
    return f"{what}: {error}"


def _low(credit: int, hours: float) -> str:
    return f"its credit of ${usd(credit)} does not last {hours:g} h (min_credit_hours)"
