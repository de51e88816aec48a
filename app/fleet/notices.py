"""Providers' words that a machine will be taken away, whichever way they come.

Invariant: a notice acts once, however often it is told: a warned machine drains at once and what it did is rented
elsewhere; one that is only endangered has to be worth its risk beside the market.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.controller import Controller
from app.fleet.core import Core
from app.fleet.leases import Leases
from app.fleet.nodes import Nodes
from app.protocol.node import NodeState
from app.storage.models import OPEN_STATES, Job, Lease, LeaseState, Node, WebhookId
from providers.base import Notice, Provider, ProviderError

log = logging.getLogger(__name__)

Taken = Literal["acted", "nothing", "replay"]
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


class Notices:
    """Acts on notices, and listens to the providers that send them."""

    def __init__(self, core: Core, leases: Leases, nodes: Nodes, controller: Controller) -> None:
        self.core = core
        self.leases = leases
        self.nodes = nodes
        self.controller = controller
        self._streams: list[asyncio.Task[None]] = []

    async def take(self, notice: Notice | None, message_id: str | None = None) -> Taken:
        """Act on a notice. With a `message_id`, only if no earlier message had it; None for a message of no use."""
        job_id: str | None = None
        async with self.core.db.write() as session:
            if message_id is not None:
                if await session.get(WebhookId, message_id) is not None:
                    return "replay"
                session.add(WebhookId(id=message_id, received_at=self.core.clock()))
            if notice is not None:
                job_id = await self._act(session, notice)
        if job_id is None or notice is None:
            return "nothing"
        self.core.announce(job_id)
        what = f"the {notice.kind} notice for {notice.instance_id} at {notice.provider}"
        self.leases.spawn(self.controller.decide(job_id, what))
        return "acted"

    async def _act(self, session: AsyncSession, notice: Notice) -> str | None:
        """The job whose fleet the notice changed; None if it changes nothing."""
        query = select(Lease).where(
            Lease.provider == notice.provider, Lease.instance_id == notice.instance_id, Lease.state.in_(OPEN_STATES)
        )
        lease = (await session.scalars(query)).first()
        if lease is None or lease.state == LeaseState.RELEASING or lease.release_wanted:
            return None
        node = (await session.scalars(select(Node).where(Node.lease_id == lease.id))).first()
        leaving = node is not None and node.state in (NodeState.DRAINING, NodeState.GONE, NodeState.LOST)
        if leaving or lease.interrupted:
            return None
        if notice.kind == "rebalance":
            return self._endanger(session, lease)
        await self._interrupt(session, lease, notice)
        return lease.job_id

    def _endanger(self, session: AsyncSession, lease: Lease) -> str | None:
        if lease.endangered_since is not None:
            return None
        lease.endangered_since = self.core.clock()
        told = f"{lease.gpu_name} on machine {lease.machine_id} may soon be interrupted: {lease.provider} says so"
        self.core.emit(session, lease.job_id, "rebalance_notice", told, lease=lease.id)
        return lease.job_id

    async def _interrupt(self, session: AsyncSession, lease: Lease, notice: Notice) -> None:
        when = f" at {notice.at:%H:%M:%S} UTC" if notice.at is not None else ""
        why = f"{lease.provider} will interrupt it{when}"
        lease.interrupted = True
        job = (await session.scalars(select(Job).where(Job.id == lease.job_id))).one()
        job.preemptions += 1
        told = f"{lease.gpu_name} on machine {lease.machine_id}: {why}"
        self.core.emit(session, lease.job_id, "interruption_notice", told, lease=lease.id)
        await self.leases.cool_down(session, lease, why)
        await self.nodes.retire(session, lease, why)

    def start(self) -> None:
        """Listen to every provider's stream."""
        self._streams = [asyncio.create_task(self._listen(p)) for p in self.core.providers.values()]

    async def stop(self) -> None:
        """Stop listening."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def listen_once(self, provider: Provider) -> int:
        """Act on what a stream tells until it ends; how many notices came. Raises what the stream raises."""
        count = 0
        async for notice in provider.notices():
            count += 1
            await self.take(notice)
        return count

    async def _listen(self, provider: Provider) -> None:
        """A stream that breaks is opened again; one that ends by itself has nothing to tell."""
        wait = FIRST_WAIT_S
        while True:
            try:
                await self.listen_once(provider)
            except (ProviderError, SQLAlchemyError, OSError) as error:
                log.warning("notices of %s broke off: %s", provider.name, error)
                await asyncio.sleep(wait)
                wait = min(LONGEST_WAIT_S, wait * 2)
            else:
                return
