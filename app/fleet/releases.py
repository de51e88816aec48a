"""Destroy calls: sent until one is accepted, without holding up anything else.

Invariant: a lease has at most one destroy call under way; an accepted one ends what accrues, and proves nothing: only a
list shows that the machine is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.core import Core
from app.storage.models import Lease, LeaseState
from providers.base import Instance, Phase, Provider, ProviderError

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""So long a round waits for its destroy calls: a provider that takes them one by one may need minutes."""
LONGEST_WAIT_S = 60.0


class Releases:
    """Sends destroy calls for the leases that are to be released."""

    def __init__(
        self,
        core: Core,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        accepted: Callable[[AsyncSession, Lease], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.core = core
        self.patience_s = patience_s
        self._spawn = spawn
        self._accepted = accepted
        self._under_way: set[str] = set()
        self._tried_at: dict[str, float] = {}
        """Lease → when its last destroy call failed; one that this process does not know of is due at once."""

    async def perform(self) -> None:
        """Send what is due; calls that take long go on by themselves."""
        async with self.core.db.read() as session:
            rows = await session.scalars(
                select(Lease).where(
                    Lease.state == LeaseState.RELEASING,
                    Lease.ended_at.is_(None),
                    # Those at others are told of in `strays`.
                    Lease.provider.in_(list(self.core.providers)),
                )
            )
            due = [lease for lease in rows if self._due(lease)]
        self._under_way.update(lease.id for lease in due)
        calls = [self._spawn(self._release(lease)) for lease in due]
        if calls:
            done, _ = await asyncio.wait(calls, timeout=self.patience_s)
            for call in done:
                call.result()

    def _due(self, lease: Lease) -> bool:
        """Backoff: 0, 2, 4, … up to 60 s between tries."""
        tries = lease.release_attempts
        # After a day of tries the power itself would be too large for a float.
        wait = min(LONGEST_WAIT_S, 2.0 ** min(tries, 32)) if tries else 0.0
        waited = self.core.clock() - self._tried_at.get(lease.id, 0.0)
        return lease.instance_id is not None and lease.id not in self._under_way and waited >= wait

    async def _release(self, lease: Lease) -> None:
        try:
            await self._destroy(lease)
        finally:
            self._under_way.discard(lease.id)

    async def _destroy(self, lease: Lease) -> None:
        failure: ProviderError | None = None
        provider, instance_id = self.core.providers[lease.provider], lease.instance_id or ""
        last = await self._last_look(provider, lease) if lease.gpu_since is None else None
        try:
            await provider.release(instance_id)
        except ProviderError as error:
            failure = error
        async with self.core.db.write() as session:
            row = await session.get_one(Lease, lease.id)
            row.release_attempts += 1
            if failure is not None:
                self._tried_at[row.id] = self.core.clock()
                self.core.emit(
                    session, row.job_id, "release_failed",
                    f"release of {row.instance_id} failed, trying again: {failure}",
                    lease=row.id,
                )  # fmt: skip
                return
            self._tried_at.pop(row.id, None)
            paid_since = last.started_at if last is not None and last.phase is Phase.RUNNING else None
            if paid_since is not None and row.gpu_since is None:
                row.gpu_since = row.gpu_until = paid_since.timestamp()
                row.gpu_running = True
            self._accepted(session, row)

    @staticmethod
    async def _last_look(provider: Provider, lease: Lease) -> Instance | None:
        """Since when is its GPU paid? No listing has shown it yet, and once gone it can't tell. A provider that does
        not answer keeps nobody from destroying."""
        try:
            return await provider.get(lease.instance_id or "")
        except ProviderError as error:
            log.warning("a last look at %s failed: %s", lease.instance_id, error)
            return None
