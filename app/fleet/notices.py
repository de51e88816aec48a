"""Providers' words that a machine will be taken away, whichever way they come: a webhook, the provider's own stream,
or the machine itself.

Invariant: a notice acts once, however often and by whomever it is told: a warned machine drains at once and what it
did is rented elsewhere; one that is only endangered has to be worth its risk beside the market. A node speaks for its
own machine only.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.controller import Controller
from app.fleet.core import Core
from app.fleet.leases import Leases
from app.fleet.nodes import Nodes
from app.protocol.base import rfc3339
from app.protocol.node import Interruption, NodeState
from app.storage.models import OPEN_STATES, Job, Lease, LeaseState, Node, WebhookId
from providers.base import Notice, Provider, ProviderError

log = logging.getLogger(__name__)

Taken = Literal["acted", "nothing", "replay"]
By = Literal["hook", "stream", "node"]
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Word:
    """What was said of one machine, and by whom."""

    kind: Literal["interruption", "rebalance"]
    by: By
    at: datetime | None
    detail: str = ""

    def why(self, provider: str) -> str:
        """What it means for the machine, as a reason."""
        said = "its node says" if self.by == "node" else f"the provider's {self.by} says"
        if self.detail:
            said += f" ({self.detail})"
        if self.kind == "rebalance":
            return f"{provider} may soon interrupt it, {said}"
        when = f" at {self.at.astimezone(UTC):%H:%M:%S} UTC" if self.at is not None else ""
        return f"{provider} will interrupt it{when}, {said}"

    def data(self) -> dict[str, Any]:
        """What the event holds beside its message."""
        return {"source": self.by, "detail": self.detail, "interrupts_at": rfc3339(self.at) if self.at else None}


class Notices:
    """Acts on notices, and listens to the providers that send them."""

    def __init__(self, core: Core, leases: Leases, nodes: Nodes, controller: Controller) -> None:
        self.core = core
        self.leases = leases
        self.nodes = nodes
        self.controller = controller
        self._streams: list[asyncio.Task[None]] = []

    async def take(self, notice: Notice | None, message_id: str | None = None) -> Taken:
        """Act on a notice. With a `message_id`, that of a webhook, only if no earlier message had it; None for a
        message of no use."""
        job_id: str | None = None
        async with self.core.db.write() as session:
            if message_id is not None:
                if await session.get(WebhookId, message_id) is not None:
                    return "replay"
                session.add(WebhookId(id=message_id, received_at=self.core.clock()))
            if notice is not None:
                query = select(Lease).where(
                    Lease.provider == notice.provider,
                    Lease.instance_id == notice.instance_id,
                    Lease.state.in_(OPEN_STATES),
                )
                lease = (await session.scalars(query)).first()
                word = Word(notice.kind, "stream" if message_id is None else "hook", notice.at)
                job_id = await self._act(session, lease, word)
        if notice is None:
            return "nothing"
        return self._follow(job_id, f"the {notice.kind} notice for {notice.instance_id} at {notice.provider}")

    async def heard(self, node_id: str, told: Interruption) -> Taken:
        """Act on what a node's machine was told. Before the heartbeat that carries it, which shows the node draining:
        one that drains for another reason has been replaced already."""
        word = Word(told.kind, "node", told.at, told.detail)
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            lease = await session.get_one(Lease, node.lease_id)
            job_id = await self._act(session, lease, word)
        return self._follow(job_id, f"the {told.kind} notice of {node_id}")

    def _follow(self, job_id: str | None, what: str) -> Taken:
        """Rent at once what takes the place."""
        if job_id is None:
            return "nothing"
        self.core.announce(job_id)
        self.leases.spawn(self.controller.decide(job_id, what))
        return "acted"

    async def _act(self, session: AsyncSession, lease: Lease | None, word: Word) -> str | None:
        """The job whose fleet the word changed; None if it changes nothing."""
        if lease is None or lease.state not in OPEN_STATES:
            return None
        if lease.state == LeaseState.RELEASING or lease.release_wanted or lease.interrupted:
            return None
        node = (await session.scalars(select(Node).where(Node.lease_id == lease.id))).first()
        if node is not None and node.state in (NodeState.DRAINING, NodeState.GONE, NodeState.LOST):
            return None
        if word.kind == "rebalance":
            return self._endanger(session, lease, word)
        await self._interrupt(session, lease, word)
        return lease.job_id

    def _endanger(self, session: AsyncSession, lease: Lease, word: Word) -> str | None:
        if lease.endangered_since is not None:
            return None
        lease.endangered_since = self.core.clock()
        told = f"{lease.gpu_name} on machine {lease.machine_id}: {word.why(lease.provider)}"
        self.core.emit(session, lease.job_id, "rebalance_notice", told, lease=lease.id, **word.data())
        return lease.job_id

    async def _interrupt(self, session: AsyncSession, lease: Lease, word: Word) -> None:
        why = word.why(lease.provider)
        lease.interrupted = True
        job = (await session.scalars(select(Job).where(Job.id == lease.job_id))).one()
        job.preemptions += 1
        told = f"{lease.gpu_name} on machine {lease.machine_id}: {why}"
        self.core.emit(session, lease.job_id, "interruption_notice", told, lease=lease.id, **word.data())
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
        """A stream that breaks, however it breaks, is opened again; one that ends by itself has nothing to tell."""
        wait, now = FIRST_WAIT_S, asyncio.get_running_loop().time
        while True:
            began = now()
            (result,) = await asyncio.gather(self.listen_once(provider), return_exceptions=True)
            if not isinstance(result, BaseException):
                return
            expected = isinstance(result, ProviderError | SQLAlchemyError | OSError)
            log.log(
                logging.WARNING if expected else logging.ERROR, "notices of %s broke off: %s", provider.name, result,
                exc_info=None if expected else result,
            )  # fmt: skip
            if now() - began > LONGEST_WAIT_S:
                wait = FIRST_WAIT_S
            await asyncio.sleep(wait)
            wait = min(LONGEST_WAIT_S, wait * 2)
