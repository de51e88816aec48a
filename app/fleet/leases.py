"""Renting and releasing: the intent first, one create call, nothing released until the provider says so.

Invariant: a lease row with its label is committed before the provider is asked; an outcome that is not known is never
rented again, only settled by the listing; a lease is `released` only after the provider accepted the release or
showed a complete list without it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import bids, bootstrap, money, proving
from app.fleet.accounts import Accounts
from app.fleet.choice import Choice
from app.fleet.core import Core
from app.fleet.labels import label_prefix, token_hash
from app.fleet.market import family
from app.fleet.releases import Releases
from app.protocol.base import usd
from app.protocol.job import JobSpec, JobStatus
from app.storage.models import Cooldown, Job, Lease, LeaseState
from providers.base import (
    Billing,
    ProviderError,
    QuotaError,
    RateLimited,
    RentResult,
    RentSpec,
)

log = logging.getLogger(__name__)

COOLDOWN_S = bids.COOLDOWN_S
RENTING = (JobStatus.PROVISIONING, JobStatus.RUNNING)
"""Only a job in one of these gets machines."""
LAST_CALLS_S = 60.0
"""So long the end of the service waits for calls to providers that are under way."""
UNFIT_S = 3600.0
"""A machine that can't run our image, and cards that our quota has no room for: soon is not going to help."""


class Leases:
    """Acts on providers for the controller."""

    def __init__(self, core: Core, accounts: Accounts) -> None:
        self.core = core
        self.accounts = accounts
        self.creating: set[str] = set()
        """Leases whose create call is under way in this process: not to be settled by a listing meanwhile."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.releases = Releases(core, self.spawn, self.end_billing)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background, kept alive until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call to a provider could not be finished", exc_info=error)

    async def drain_tasks(self, timeout_s: float = LAST_CALLS_S) -> None:
        """Wait for calls that are under way, so that their outcome is written down. One that takes longer is cut off:
        what became of it the next process settles by the provider's list."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self._tasks and (left := until - loop.time()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left)
        if self._tasks:
            log.warning("%d calls to providers are cut off after %.0f s", len(self._tasks), timeout_s)
            cut = set(self._tasks)
            for task in cut:
                task.cancel()
            await asyncio.wait(cut, timeout=1.0)

    async def rent(self, job_id: str, choices: Sequence[Choice], retired_by_these: Sequence[str] = ()) -> list[str]:
        """Commit one intent per choice, then send the create calls in the background. Returns the lease ids; none if
        the job was ended or paused since the decision."""
        made: list[tuple[str, Choice, str]] = []
        async with self.core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            if job.status not in RENTING:
                return []
            for choice in choices:
                token = "jt_" + secrets.token_urlsafe(32)
                lease = self._intent(job, choice, token)
                session.add(lease)
                made.append((lease.id, choice, token))
                self.core.emit(
                    session,
                    job_id,
                    "lease_intent",
                    f"renting {choice.offer.num_gpus}× {choice.offer.gpu_name} (machine {choice.offer.machine_id}) at "
                    f"{choice.offer.provider} for ${usd(choice.rate_micros_h)}/h, expected {choice.mu:.4g} rollouts/s",
                    lease=lease.id,
                    offer=choice.offer.offer_id,
                )
            for old in await session.scalars(select(Lease).where(Lease.id.in_(retired_by_these))):
                old.retire_after = [lease_id for lease_id, _, _ in made]
            self.creating.update(lease_id for lease_id, _, _ in made)
        for lease_id, choice, token in made:
            self.spawn(self._create(lease_id, choice, token))
        return [lease_id for lease_id, _, _ in made]

    def _intent(self, job: Job, choice: Choice, token: str) -> Lease:
        now, offer = self.core.clock(), choice.offer
        lease_id = "lease_" + secrets.token_hex(8)
        return Lease(
            id=lease_id,
            job_id=job.id,
            provider=offer.provider,
            offer_id=offer.offer_id,
            machine_id=offer.machine_id,
            gpu_name=offer.gpu_name,
            num_gpus=offer.num_gpus,
            region=offer.region,
            billing=offer.billing.value,
            state=LeaseState.INTENT,
            state_since=now,
            reason=f"asking {offer.provider} for the machine",
            label=f"{label_prefix(self.core.settings.fleet_id)}{lease_id}:1",
            quoted_micros_h=offer.compute_micros_h,
            rate_micros_h=choice.rate_micros_h,
            market_micros_h=offer.compute_micros_h,
            agreed_micros_h=0 if offer.billing is Billing.SPOT_MARKET else choice.rate_micros_h,
            start_micros_h=choice.start_micros_h,
            image_micros=choice.image_micros,
            model_micros=choice.model_micros,
            host_ends_at=None if offer.max_duration_s is None else now + offer.max_duration_s,
            disk_gb=job.spec["fleet"]["disk_gb"],
            disk_micros_gb_month=offer.disk_micros_gb_month,
            upload_micros_gb=offer.upload_micros_gb,
            download_micros_gb=offer.download_micros_gb,
            up_mbps=offer.up_mbps,
            down_mbps=offer.down_mbps,
            reliability=offer.reliability,
            gpu_ram_mb=offer.gpu_ram_mb,
            mu_prior=choice.mu,
            effective_micros_h=choice.effective_micros_h,
            join_token_hash=token_hash(token),
            created_at=now,
            expires_at=now + self.core.settings.lease_hours * 3600,
        )

    async def _create(self, lease_id: str, choice: Choice, token: str) -> None:
        """The one create call of this intent. Until its outcome is written down no list settles the lease; whatever
        goes wrong here, the next list does."""
        try:
            await self._ask(lease_id, choice, token)
        finally:
            self.creating.discard(lease_id)

    async def _ask(self, lease_id: str, choice: Choice, token: str) -> None:
        settings, offer = self.core.settings, choice.offer
        async with self.core.db.read() as session:
            lease = await session.get_one(Lease, lease_id)
            job = (await session.scalars(select(Job).where(Job.id == lease.job_id))).one()
        engine = proving.engine_for(settings.agent_engine, JobSpec.model_validate(job.spec).trust.proofs)
        spec = RentSpec(
            label=lease.label,
            image=settings.agent_image,
            onstart=bootstrap.onstart(settings.agent_package),
            env=bootstrap.environment(
                control_url=settings.public_url,
                join_token=token,
                engine=engine,
                provider=offer.provider,
                hf_endpoint=settings.agent_hf_endpoint,
                further=settings.agent_env,
            ),
            disk_gb=lease.disk_gb,
            # A host without a free port would start without the one that it promised: such a node relays to nobody.
            ports=(bootstrap.RELAY_PORT,) if offer.ports > 0 else (),
            bid_micros_h=choice.rate_micros_h if offer.billing is Billing.SPOT_BID else None,
        )
        try:
            result = await self.core.providers[offer.provider].rent(offer, spec)
        except ProviderError as error:
            # Raised before anything was sent: a capability or a key; nothing exists.
            result = RentResult("refused", error=error)
        async with self.core.db.write() as session:
            await self._settle(session, await session.get_one(Lease, lease_id), result)
        self.core.announce(lease.job_id)
        if result.outcome == "refused":
            self.core.signals.notify("tick")

    async def _settle(self, session: AsyncSession, lease: Lease, result: RentResult) -> None:
        if result.outcome == "created" and result.instance_id is not None:
            self.exists(session, lease, result.instance_id)
        elif result.outcome == "unknown":
            self.move(lease, LeaseState.UNKNOWN, f"the create call's outcome is not known: {result.error}")
            self.core.emit(session, lease.job_id, "lease_unknown", lease.reason, lease=lease.id)
        elif result.doomed_id is not None:
            self.exists(session, lease, result.doomed_id)
            self.request_release(session, lease, f"refused, but an instance was made: {result.error}")
            await self._blame(session, lease, result.error)
        else:
            self.move(lease, LeaseState.REFUSED, f"{result.error}")
            self.core.emit(
                session, lease.job_id, "lease_refused", f"offer {lease.offer_id}: {result.error}", lease=lease.id
            )
            await self._blame(session, lease, result.error)

    async def _blame(self, session: AsyncSession, lease: Lease, error: ProviderError | None) -> None:
        """The account, if the refusal tells of it; all machines of its kind, if a quota is full; else the machine."""
        if isinstance(error, QuotaError):
            await self.cool_down(session, lease, f"quota: {error}", key=family(lease.gpu_name, lease.region), s=UNFIT_S)
        elif not await self.accounts.refused(session, lease.provider, error) and not isinstance(error, RateLimited):
            await self.cool_down(session, lease, f"refused: {error}")

    def move(self, lease: Lease, state: LeaseState, reason: str) -> None:
        """Change the state, with reason and since-when."""
        lease.state, lease.reason, lease.state_since = state, reason, self.core.clock()

    def exists(self, session: AsyncSession, lease: Lease, instance_id: str) -> None:
        """The instance is known: disk accrues from the moment when it was asked for."""
        lease.instance_id = instance_id
        if lease.exists_since is None:
            lease.exists_since = lease.disk_until = lease.created_at
        if lease.release_wanted:
            self.request_release(session, lease, lease.reason)
        elif lease.join_token_used_at is not None:
            # A fast machine joins before the answer to the create call is here.
            self.move(lease, LeaseState.ACTIVE, "its node has joined")
        else:
            self.move(lease, LeaseState.BOOTING, "waiting for the machine to start and its node to join")
            self.core.emit(
                session,
                lease.job_id,
                "lease_created",
                f"rented {lease.gpu_name} as instance {instance_id} at {lease.provider}",
                lease=lease.id,
            )

    def request_release(self, session: AsyncSession, lease: Lease, reason: str) -> None:
        """Decide to give a lease back. The call itself is made by `perform_releases`."""
        state = LeaseState(lease.state)
        if not state.open or state is LeaseState.RELEASING:
            return
        if lease.instance_id is None:
            lease.release_wanted, lease.reason = True, reason
            return
        self.move(lease, LeaseState.RELEASING, reason)
        self.core.emit(
            session, lease.job_id, "lease_releasing", f"releasing {lease.gpu_name}: {reason}", lease=lease.id
        )
        self.core.signals.notify("release")

    async def perform_releases(self) -> None:
        """Send a destroy for each lease that is to be released and has no accepted one yet."""
        await self.releases.perform()

    def end_billing(self, session: AsyncSession, lease: Lease) -> None:
        """The provider accepted the release: nothing accrues from here. A later listing must confirm it."""
        lease.ended_at = self.core.clock()
        money.close(session, lease, lease.ended_at, self.core.metrics)

    def released(self, session: AsyncSession, lease: Lease, reason: str) -> None:
        """The provider shows that it is gone."""
        if lease.ended_at is None:
            self.end_billing(session, lease)
        else:
            # The GPU's start may have been seen only after the release was accepted.
            money.close(session, lease, lease.ended_at, self.core.metrics)
        lease.gpu_running = False
        self.core.told.pop(lease.id, None)
        self.move(lease, LeaseState.RELEASED, reason)
        cost = usd(sum(money.spent(lease, self.core.clock()).values()))
        self.core.emit(
            session, lease.job_id, "lease_released", f"{lease.gpu_name} is gone after ${cost}: {reason}", lease=lease.id
        )

    async def cool_down(
        self, session: AsyncSession, lease: Lease, reason: str, *, key: str = "", s: float = COOLDOWN_S
    ) -> None:
        """Leave the machine (or all that `key` stands for) alone for `s` seconds; each further failure doubles it."""
        key = key or lease.machine_id
        row = await session.get(Cooldown, (lease.provider, key))
        now = self.core.clock()
        # What comes while it is left alone was begun before: several machines of a pool, refused in one go.
        count = 1 if row is None else row.count if now < row.until else bids.troubles(row.count, row.until, now)
        until = now + bids.cooldown_s(count, s)
        if row is None:
            session.add(
                Cooldown(provider=lease.provider, machine_id=key, until=until, count=count, reason=reason[:500])
            )
        else:
            row.until, row.count, row.reason = max(row.until, until), count, reason[:500]
