"""The reaper: destroys what carries our fleet's label and has no live lease, with or without a control service.

Invariant: only a positive reading of list and database condemns: other labels are never touched, and where either
can't be read nothing is destroyed there. The list is read before the database, so that every instance that it shows
had its lease committed by then. What the service may be about to adopt is looked at twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money
from app.fleet.labels import label_prefix
from app.fleet.metrics import Metrics
from app.protocol.job import FINAL_STATUSES
from app.storage.database import Database
from app.storage.models import Event, Job, Lease, LeaseState
from providers.base import Instance, Phase, Provider, ProviderError

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Between two looks at a lease that a running service would adopt meanwhile."""
GRACE_S = 600.0
"""A lease that nobody renewed is over this long after its end."""
UNSETTLED = (LeaseState.INTENT, LeaseState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Finding:
    """An instance with our label, or a provider that can't be read, and what was done about it."""

    provider: str
    instance_id: str = ""
    label: str = ""
    lease_id: str = ""
    state: str = ""
    why: str = ""
    """Why it has to go; empty if it may stay."""
    action: str = "kept"
    failed: bool = False


def verdict(lease: Lease | None, job_over: bool, now: float, settle_s: float) -> str:
    """Why an instance with our label has to go; empty if its lease lives. Pure."""
    if lease is None:
        return "it has no lease"
    state = LeaseState(lease.state)
    if not state.open or state is LeaseState.RELEASING:
        return f"its lease is {state.value}"
    if state in UNSETTLED:
        age = now - lease.created_at
        return f"asked for {age:.0f} s ago and never adopted" if age >= settle_s else ""
    if job_over:
        return "its job is over"
    late = now - lease.expires_at
    return f"its lease ended {late:.0f} s ago and nobody renewed it" if late > GRACE_S else ""


class Reaper:
    """Needs the providers' keys and the database, and nothing else."""

    def __init__(
        self,
        db: Database,
        providers: Mapping[str, Provider],
        *,
        fleet_id: str,
        settle_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.db = db
        self.providers = providers
        self.prefix = label_prefix(fleet_id)
        self.settle_s = settle_s
        self.clock = clock
        self.sleep = sleep

    async def run(self, *, dry_run: bool) -> list[Finding]:
        """One sweep over all providers. Raises SQLAlchemyError or OSError when the database can't be read."""
        found: list[tuple[Finding, Instance]] = []
        out: list[Finding] = []
        for name, provider in self.providers.items():
            try:
                listing = await provider.list()
            except ProviderError as error:
                out.append(Finding(name, why=f"{error.code}: {error}", action="not read", failed=True))
                continue
            if not listing.complete:
                out.append(Finding(name, why="only a part of its list was read", action="run again", failed=True))
            found += [(Finding(name, i.instance_id, i.label), i) for i in listing.instances if self._ours(i)]
        judged = await self._judge(found)
        if not dry_run and any(f.state in UNSETTLED and f.why for f, _ in judged):
            await self.sleep(PATIENCE_S)
            judged = await self._judge(judged)
        for finding, instance in judged:
            out.append(await self._act(finding, instance, dry_run))
        return out + await self._unreachable()

    def _ours(self, instance: Instance) -> bool:
        return instance.label.startswith(self.prefix) and instance.phase is not Phase.TERMINATING

    async def _judge(self, found: Sequence[tuple[Finding, Instance]]) -> list[tuple[Finding, Instance]]:
        now = self.clock()
        async with self.db.read() as session:
            rows = await session.scalars(select(Lease).where(Lease.label.in_([i.label for _, i in found])))
            leases = {lease.label: lease for lease in rows}
            over = set(await session.scalars(select(Job.id).where(Job.status.in_(list(FINAL_STATUSES)))))
        out = []
        for finding, instance in found:
            lease = leases.get(instance.label)
            why = verdict(lease, lease is not None and lease.job_id in over, now, self.settle_s)
            if lease is not None and lease.instance_id not in (None, instance.instance_id) and not why:
                why = f"its lease lives on instance {lease.instance_id}"
            known = ("", "") if lease is None else (lease.id, lease.state)
            out.append((replace(finding, lease_id=known[0], state=known[1], why=why), instance))
        return out

    async def _act(self, finding: Finding, instance: Instance, dry_run: bool) -> Finding:
        if not finding.why:
            return finding
        if dry_run:
            return replace(finding, action="would be destroyed")
        try:
            await self.providers[finding.provider].release(instance.instance_id)
        except ProviderError as error:
            return replace(finding, action=f"not destroyed: {error.code}: {error}", failed=True)
        async with self.db.write() as session:
            await self._write_down(session, finding, instance)
        return replace(finding, action="destroyed")

    async def _write_down(self, session: AsyncSession, finding: Finding, instance: Instance) -> None:
        """What it cost until now goes into the ledger; a later list confirms to the service that it is gone."""
        now = self.clock()
        lease = await session.get(Lease, finding.lease_id) if finding.lease_id else None
        message = f"the reaper destroyed instance {instance.instance_id} at {finding.provider}: {finding.why}"
        data = {"lease": finding.lease_id, "label": instance.label}
        job_id = None if lease is None else lease.job_id
        session.add(Event(job_id=job_id, at=now, kind="reaped", message=message, data=data))
        if lease is None or lease.instance_id not in (None, instance.instance_id):
            return
        _resume_billing(lease, instance, now)
        lease.state, lease.state_since, lease.reason = LeaseState.RELEASING, now, f"reaped: {finding.why}"
        lease.ended_at = now
        money.close(session, lease, now, Metrics())

    async def _unreachable(self) -> list[Finding]:
        """Open leases at providers whose keys are not here."""
        async with self.db.read() as session:
            rows = await session.scalars(
                select(Lease)
                .where(Lease.state.in_([s for s in LeaseState if s.open]), Lease.provider.not_in(list(self.providers)))
                .order_by(Lease.created_at)
            )
            why = "ECHO2_PROVIDERS does not name its provider"
            return [
                Finding(x.provider, x.instance_id or "", x.label, x.id, x.state, why, "not read", failed=True)
                for x in rows
            ]


def _resume_billing(lease: Lease, instance: Instance, now: float) -> None:
    """As the list shows it: it has existed, and cost, until now, whatever the lease said."""
    lease.instance_id = instance.instance_id
    if lease.exists_since is None:
        lease.exists_since = lease.disk_until = lease.created_at
    if lease.ended_at is not None:
        lease.disk_until = lease.ended_at
        lease.gpu_until = lease.ended_at if lease.gpu_until is not None else None
        lease.ended_at = None
    if instance.phase is Phase.RUNNING and not lease.gpu_running:
        started = instance.started_at.timestamp() if instance.started_at else now
        lease.gpu_until = max(started, lease.gpu_until or 0.0)
        lease.gpu_since = lease.gpu_since or started
        lease.gpu_running = True
