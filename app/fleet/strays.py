"""Leases that nobody would look at any more: those of jobs that are over, and those at providers that this service does
not speak to.

Invariant: whatever was written in between, a lease whose job is over is given back; one that can't be given back from
here is told of, once a process.
"""

from __future__ import annotations

import logging

from sqlalchemy import ColumnElement, select

from app.fleet.core import Core
from app.fleet.leases import Leases
from app.protocol.job import FINAL_STATUSES
from app.storage.models import OPEN_STATES, Job, Lease, LeaseState

log = logging.getLogger(__name__)


class Strays:
    """Looks for them once a round."""

    def __init__(self, core: Core, leases: Leases) -> None:
        self.core = core
        self.leases = leases
        self._told: set[str] = set()

    async def look(self) -> None:
        """Give back what belongs to no job, and tell of what is out of reach."""
        found = self._forgotten() | self._unreachable()
        query = select(Lease.id).where(Lease.state.in_(OPEN_STATES), found).limit(1)
        async with self.core.db.read() as session:
            any_found = (await session.scalars(query)).first() is not None
        # Only now: a session that stays open while another one waits to write is a connection that nobody uses.
        if any_found:
            await self._act()

    async def _act(self) -> None:
        async with self.core.db.write() as session:
            for lease in await session.scalars(select(Lease).where(Lease.state.in_(OPEN_STATES), self._forgotten())):
                if not lease.release_wanted:
                    self.leases.request_release(session, lease, "its job is over")
            for lease in await session.scalars(select(Lease).where(Lease.state.in_(OPEN_STATES), self._unreachable())):
                if lease.id not in self._told:
                    self._told.add(lease.id)
                    what = f"instance {lease.instance_id or 'that may exist'} at {lease.provider} ({lease.label})"
                    why = "ECHO2_PROVIDERS does not name its provider: name it, or end the instance in its console"
                    message = f"{what} can't be seen or given back: {why}"
                    log.warning("%s %s", lease.job_id, message)
                    self.core.emit(session, lease.job_id, "lease_out_of_reach", message, lease=lease.id)

    @staticmethod
    def _forgotten() -> ColumnElement[bool]:
        over = select(Job.id).where(Job.status.in_(list(FINAL_STATUSES)))
        return Lease.job_id.in_(over) & (Lease.state != LeaseState.RELEASING)

    def _unreachable(self) -> ColumnElement[bool]:
        return Lease.provider.not_in(list(self.core.providers))
