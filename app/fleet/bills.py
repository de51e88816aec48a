"""Our ledger against what providers say that they bill.

Invariant: a bill is compared with the ledger of the very lease that it names; of one that is not complete only what is
too much already counts; each difference is told once, and again only when its size changes. Once a bill is final, the
ledger gets an entry with the difference: from then on both say the same.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money
from app.fleet.core import Core
from app.protocol.base import usd
from app.storage.models import Lease, LeaseState, ProviderBill
from providers.base import Charge, ProviderError

log = logging.getLogger(__name__)

SHARE, AMOUNT = 0.01, 50_000
"""A difference above 1 % of the bill, or above 5 cents, is told."""
NOISE = 1_000
"""A tenth of a cent is rounding, and the seconds between a destroy call and its effect."""
SLACK_S = 10.0
"""A bill that reaches to within this of a lease's end reaches the end."""
LATE_SLACK_S = 900.0
"""The same of one that is taken as complete because of its age: so long may answers to destroy calls be lost while the
machine is gone. A larger gap may be a part of the bill that is still to come: our ledger is left as it is."""
FINAL_S = 6 * 3600.0
"""So long after a lease's end its bill is taken as complete, whatever it says."""
GIVE_UP_S = 48 * 3600.0
"""So long after a lease's end no bill that names it is waited for."""
AGAIN_S = 300.0
"""A provider that did not answer is asked again after this."""


@dataclass(frozen=True, slots=True)
class Billed:
    """A lease's lines of the bill, added up."""

    micros: int
    through: float
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The same by kind."""


def matched(charges: Iterable[Charge], leases: Sequence[Lease]) -> dict[str, Billed]:
    """Lease id → its bill: by label where a line has one, else by the instance's id. Lines of others are left out."""
    by_label = {lease.label: lease.id for lease in leases}
    by_instance = {lease.instance_id: lease.id for lease in leases if lease.instance_id}
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    through: dict[str, float] = {}
    for charge in charges:
        found = by_label.get(charge.label) if charge.label else by_instance.get(charge.instance_id)
        if found is None:
            continue
        sums[found][charge.kind] += charge.micros
        through[found] = max(through.get(found, 0.0), charge.end.timestamp())
    return {lease_id: Billed(kinds.total(), through[lease_id], dict(kinds)) for lease_id, kinds in sums.items()}


def apart(bill: int, ledger: int) -> bool:
    """Whether the difference is worth telling. Micro-dollars."""
    difference = abs(bill - ledger)
    return difference > NOISE and (difference > SHARE * bill or difference > AMOUNT)


def news(bill: int, ledger: int, told: int | None) -> bool:
    """Whether this difference is another one than was told last (`told`: bill less ledger then)."""
    if not apart(bill, ledger):
        return told is not None
    return told is None or apart(bill, ledger + told)


def _final(lease: Lease, billed: Billed, before: ProviderBill | None, now: float) -> bool:
    """Whether the bill of this lease will not change any more."""
    if lease.state != LeaseState.RELEASED or lease.ended_at is None:
        return False
    if now - lease.ended_at > FINAL_S:
        return True
    # A line may cover an hour that is not counted to its end: what disagrees has to say the same twice.
    agrees = not apart(billed.micros, sum(money.spent(lease, now).values()))
    again = before is not None and before.checked_at >= lease.ended_at and before.micros == billed.micros
    return billed.through >= lease.ended_at - SLACK_S and (agrees or again)


def _reaches_end(lease: Lease, billed: Billed, now: float) -> bool:
    if lease.ended_at is None:
        return False
    slack = LATE_SLACK_S if now - lease.ended_at > FINAL_S else SLACK_S
    return billed.through >= lease.ended_at - slack


class Bills:
    """Reads bills at every provider that has them."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._asked_at: dict[str, float] = {}
        self._quiet_until: dict[str, float] = {}
        """Provider that did not answer → when it is asked again, whatever has ended meanwhile."""
        self._busy = False

    async def run(self) -> None:
        """Look at the bills of all providers where it is due: every `charges_seconds`, and when a lease has ended."""
        if self._busy:
            return
        self._busy = True
        try:
            for name in self.core.providers:
                await self._provider(name)
        finally:
            self._busy = False

    async def _provider(self, name: str) -> None:
        now = self.core.clock()
        async with self.core.db.read() as session:
            leases = await self._open(session, name, now)
            if not leases or not await self._due(session, name, now):
                return
        self._asked_at[name] = now
        since = datetime.fromtimestamp(min(lease.created_at for lease in leases), UTC)
        try:
            charges = await self.core.providers[name].charges(since)
        except ProviderError as error:
            log.warning("bill of %s: %s", name, error)
            self._asked_at.pop(name, None)
            self._quiet_until[name] = now + AGAIN_S
            return
        bills = matched(charges, leases)
        if bills:
            async with self.core.db.write() as session:
                await self._write_down(session, bills, now)

    async def _due(self, session: AsyncSession, name: str, now: float) -> bool:
        if now < self._quiet_until.get(name, 0.0):
            return False
        asked = self._asked_at.get(name)
        if asked is None or now - asked >= self.core.settings.charges_seconds:
            return True
        ended = select(func.count()).where(
            Lease.provider == name, Lease.state == LeaseState.RELEASED, Lease.state_since > asked
        )
        return bool(await session.scalar(ended))

    @staticmethod
    async def _open(session: AsyncSession, name: str, now: float) -> list[Lease]:
        """Leases whose bill is not settled."""
        hopeless = and_(Lease.ended_at.is_not(None), Lease.ended_at < now - GIVE_UP_S)
        unread = and_(ProviderBill.lease_id.is_(None), or_(Lease.ended_at.is_(None), ~hopeless))
        query = (
            select(Lease)
            .outerjoin(ProviderBill, ProviderBill.lease_id == Lease.id)
            .where(Lease.provider == name, Lease.exists_since.is_not(None))
            .where(or_(unread, ProviderBill.final.is_(False)))
        )
        return list(await session.scalars(query))

    async def _write_down(self, session: AsyncSession, bills: Mapping[str, Billed], now: float) -> None:
        for lease in await session.scalars(select(Lease).where(Lease.id.in_(list(bills)))):
            billed = bills[lease.id]
            row = await session.get(ProviderBill, lease.id)
            final = _final(lease, billed, row, now)
            if row is None:
                row = ProviderBill(lease_id=lease.id, provider=lease.provider, reported_micros=None)
                session.add(row)
            row.micros, row.through, row.checked_at, row.final = billed.micros, billed.through, now, final
            self._compare(session, lease, row, now)
            if final and _reaches_end(lease, billed, now):
                # What we could only guess (when a machine that nobody could see stopped) is known now.
                money.settle(session, lease, billed.kinds, self.core.metrics)

    def _compare(self, session: AsyncSession, lease: Lease, row: ProviderBill, now: float) -> None:
        ledger = sum(money.spent(lease, now).values())
        if not row.final and row.micros < ledger:
            # The rest of the bill is still to come.
            return
        if not news(row.micros, ledger, row.reported_micros):
            return
        difference = row.micros - ledger
        where = f"{lease.id} (instance {lease.instance_id} at {lease.provider})"
        sums = f"the provider bills ${usd(row.micros)}, our ledger says ${usd(ledger)}"
        if apart(row.micros, ledger):
            row.reported_micros = difference
            share = f" ({difference / row.micros:+.1%})" if row.micros else ""
            kind, message = "bill_differs", f"{where}: {sums}, a difference of ${usd(difference)}{share}"
        else:
            row.reported_micros = None
            kind, message = "bill_agrees", f"{where}: {sums}, which is the same again"
        self.core.emit(
            session, lease.job_id, kind, message,
            lease=lease.id, bill_usd=usd(row.micros), ledger_usd=usd(ledger), difference_usd=usd(difference),
        )  # fmt: skip
