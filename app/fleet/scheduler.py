"""Drives the loop: APScheduler for the clockwork, signals for what can't wait.

Invariant: one round at a time; a round that fails says so and the next one comes all the same. While another control
service may have the database nothing is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy import delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from app.fleet import heldout, money, partials
from app.fleet.accounts import Accounts
from app.fleet.bills import Bills
from app.fleet.controller import Controller
from app.fleet.core import Core
from app.fleet.costs import Costs
from app.fleet.leases import Leases
from app.fleet.litter import Litter
from app.fleet.reconcile import Reconciler
from app.fleet.roster import LIVE
from app.fleet.stored import StoredSnapshots
from app.fleet.strays import Strays
from app.protocol.errors import Unavailable
from app.protocol.job import FINAL_STATUSES
from app.storage.models import IdempotencyRecord, Job, Lease, LeaseState, Node, SpotPrice, WebhookId

log = logging.getLogger(__name__)

UNSETTLED = (LeaseState.INTENT, LeaseState.UNKNOWN, LeaseState.BOOTING, LeaseState.RELEASING)
SILENCE_EACH_S = 2.0
"""A node whose time is up is lost now, and not at the next tick."""
KEEP_IDS_S = 24 * 3600.0
KEEP_PRICES_S = 3600.0
"""A price counts until its provider's offers are read anew."""
GARBAGE_EACH_S = 600.0
WATCHED = ("tick", "release")
GRACE_S = 2.0
"""So long a round has to end by itself when the service does."""
CUT_S = 6.0
"""So long the end waits for what it has cut off then: a part of a round has 5 s to let go."""
PATIENCE_S = 10.0
"""So long a round waits for the providers' lists: one that is slow keeps nobody from acting on the others'."""


class Loop:
    """The clockwork of the control service."""

    def __init__(
        self,
        core: Core,
        controller: Controller,
        leases: Leases,
        reconciler: Reconciler,
        accounts: Accounts,
        bills: Bills,
    ) -> None:
        self.core = core
        self.accounts = accounts
        self.bills = bills
        self.costs = Costs(core)
        self.controller = controller
        self.leases = leases
        self.reconciler = reconciler
        self.snapshots = StoredSnapshots(core)
        self.litter = Litter(core)
        self.last_round_at = 0.0
        self.patience_s = PATIENCE_S
        self.strays = Strays(core, leases)
        self._reconciled_at: dict[str, float] = {}
        self._listing: dict[str, asyncio.Task[None]] = {}
        """Providers whose list is being read."""
        self._silent: set[str] = set()
        """Nodes for whose silence the loop was woken: once each, for not every round may act on it."""
        self._one = asyncio.Lock()
        self._scheduler = AsyncIOScheduler(timezone="UTC")
        self._watchers: list[asyncio.Task[None]] = []
        self._beats: set[asyncio.Task[Any]] = set()
        """What the scheduler began and has not ended."""
        self._billing: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Reconcile with every provider, then begin to tick."""
        await self.round()
        seconds = self.core.settings.tick_seconds
        options = {"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        for name, work, each_s in (
            ("round", self.round, seconds),
            ("silence", self.listen_for_silence, SILENCE_EACH_S),
            ("garbage", self._collect_garbage, GARBAGE_EACH_S),
        ):
            self._scheduler.add_job(self._beat, "interval", (name, work), seconds=each_s, id=name, **options)
        self._scheduler.start()
        self._watchers = [
            asyncio.create_task(self._watch(name, work))
            for name, work in zip(WATCHED, (self.round, self._releases), strict=True)
        ]

    async def stop(self) -> None:
        """Stop ticking. Calls that change something at a provider are waited for; what only reads is cut off."""
        self._stopping = True
        if self._scheduler.running:
            self._scheduler.pause()
        for name in WATCHED:
            self.core.signals.notify(name)
        self._cut_lists()
        # A statement of the database that is cut off leaves a connection that complains; given a moment it is done.
        await _end([*self._watchers, *self._beats, *([] if self._billing is None else [self._billing])])
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        await self.core.store.stop()
        self._cut_lists()  # one may have begun after all
        async with self._one:
            await self.leases.drain_tasks()

    def _cut_lists(self) -> None:
        for name, task in self._listing.items():
            if name in self.reconciler.listing:
                task.cancel()

    async def _beat(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What the scheduler calls. It logs whatever it cancels at its end as a failure, so that `stop` ends this
        before, and to the scheduler it has ended well."""
        task = asyncio.current_task()
        assert task is not None
        self._beats.add(task)
        task.add_done_callback(self._beats.discard)
        with suppress(asyncio.CancelledError):
            await self._guarded(name, work())

    async def _watch(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while not self._stopping:
            news = self.core.signals.subscribe(name)
            if await self.core.signals.wait(news, 60.0):
                await self._guarded(f"what {name} asked for", work())

    async def round(self) -> None:
        """Reconcile where it is due, act for every job, accrue."""
        async with self._one:
            if not await self._alone():
                return  # after a while of this /readyz says that no round comes
            await self._guarded("object store", self.core.store.look())
            await self._guarded("reconcile", self._reconcile())
            await self._guarded("strays", self.strays.look())
            await self._guarded("balances", self.accounts.check())
            await self._guarded("releases", self.leases.perform_releases())
            for job_id in await self._live_jobs():
                await self._guarded(f"tick of {job_id}", self.controller.tick(job_id))
                await self._guarded(f"forecast of {job_id}", self.costs.watch(job_id))
            await self._guarded("releases", self.leases.perform_releases())
            await self._guarded("ledger", self._accrue())
            # A bill may have many pages; nothing waits for it.
            if self._billing is None or self._billing.done():
                self._billing = self.leases.spawn(self._guarded("bills", self.bills.run()))
            self.last_round_at = self.core.clock()

    async def listen_for_silence(self) -> None:
        """Wake the loop as soon as a node has been silent for too long: it is the quickest word of an interruption."""
        now, started = self.core.clock(), self.core.started_at
        deadline = now - self.core.settings.heartbeat_timeout_seconds
        if started > deadline:
            return
        query = select(Node.id).where(Node.state.in_(LIVE), Node.heartbeat_at < deadline)
        try:
            async with self.core.db.read() as session:
                silent = set(await session.scalars(query))
        except (SQLAlchemyError, OSError) as error:
            log.warning("the nodes could not be looked at: %s", error)
            return
        if silent - self._silent:
            self.core.signals.notify("tick")
        self._silent = silent

    async def _releases(self) -> None:
        async with self._one:
            if await self._alone():
                await self._guarded("releases", self.leases.perform_releases())

    async def _alone(self) -> bool:
        try:
            await self.core.db.keep_claim()
        except Unavailable as error:
            log.error("nothing is done in this round: %s", error.detail)
            return False
        return True

    async def _guarded(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """One part that fails, however it fails, must not keep the others, and other jobs, from their turn. At the end
        of the service nothing is begun any more."""
        if self._stopping:
            work.close()
            return
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=5.0)
            raise
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s", what, error, exc_info=error)

    async def _live_jobs(self) -> list[str]:
        async with self.core.db.read() as session:
            return list(
                await session.scalars(select(Job.id).where(Job.status.not_in(list(FINAL_STATUSES))).order_by(Job.seq))
            )

    async def _reconcile(self) -> None:
        """Every provider at `reconcile_seconds`; at each round one where something is unsettled."""
        now = self.core.clock()
        async with self.core.db.read() as session:
            # A joined machine is unsettled until a listing told since when its GPU is paid.
            unseen = (Lease.state == LeaseState.ACTIVE) & Lease.gpu_since.is_(None)
            unsettled = set(
                await session.scalars(select(Lease.provider).where(Lease.state.in_(UNSETTLED) | unseen).distinct())
            )
        due = [
            name
            for name in self.core.providers
            if name in unsettled
            or name not in self._reconciled_at
            or now - self._reconciled_at[name] >= self.core.settings.reconcile_seconds
        ]
        for name in due:
            if name not in self._listing:
                self._reconciled_at[name] = now
                task = self.leases.spawn(self._guarded(f"reconcile with {name}", self.reconciler.run(name)))
                self._listing[name] = task
                task.add_done_callback(partial(self._was_read, name))
        if reading := {self._listing[name] for name in due if name in self._listing}:
            await asyncio.wait(reading, timeout=self.patience_s)

    def _was_read(self, name: str, task: asyncio.Task[None]) -> None:
        self._listing.pop(name, None)

    async def _accrue(self) -> None:
        async with self.core.db.write() as session:
            await money.close_due(session, self.core.clock(), self.core.metrics)
        await self._gauges()

    async def _gauges(self) -> None:
        metrics = self.core.metrics
        async with self.core.db.read() as session:
            leases = await session.execute(
                select(Lease.provider, Lease.state, func.count()).group_by(Lease.provider, Lease.state)
            )
            nodes = await session.execute(select(Node.state, func.count()).group_by(Node.state))
            metrics.leases.clear()
            metrics.nodes.clear()
            for provider, state, count in leases.tuples():
                metrics.leases.labels(provider, state).set(count)
            for state, count in nodes.tuples():
                metrics.nodes.labels(state).set(count)

    async def _collect_garbage(self) -> None:
        """Forget webhook ids, idempotent answers and spot prices in time; remove snapshots that nobody needs."""
        async with self._one:  # the claim is looked at by one at a time
            if not await self._alone():
                return
        now = self.core.clock()
        async with self.core.db.write() as session:
            await session.execute(delete(WebhookId).where(WebhookId.received_at < now - KEEP_IDS_S))
            await session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.created_at < now - KEEP_IDS_S))
            await session.execute(delete(SpotPrice).where(SpotPrice.received_at < now - KEEP_PRICES_S))
        await self._guarded("removal of old snapshots", self.snapshots.collect())
        await self._guarded("removal of what jobs left behind", partials.collect(self.core))
        await self._guarded("removal of old rollouts", self.litter.collect())
        await self._guarded("removal of held-out answers", heldout.sweep(self.core))


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until they have ended; what has not within a moment is cancelled."""
    left = set(tasks)
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CUT_S)
