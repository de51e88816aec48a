"""Notifications: what happens to a job, told to the address that its owner named.

Invariant: what is told is what is in the events, in their order and each until it was taken or a day is over; the
same event has the same `webhook-id` at every try, so a receiver that has seen it can pass over it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime

import httpx
from pydantic import SecretStr
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.exc import SQLAlchemyError
from standardwebhooks import Webhook

from app.fleet.core import Core
from app.fleet.outward import Forbidden, Outward
from app.protocol.base import rfc3339
from app.protocol.job import FINAL_STATUSES
from app.settings import Settings
from app.storage.models import Event, Job, Outbox

log = logging.getLogger(__name__)

TOLD = ("job_", "budget", "forecast", "capacity_", "bill")
"""Beginnings of the kinds that are told: the job's life, its money, what it can't reach."""
TOLD_TOO = (
    "preempted", "interruption_notice", "rebalance_notice", "node_lost", "node_idle", "lease_ghost", "no_offers",
    "at_max_nodes", "provider_unusable", "learner_restarted", "notification_dropped",
)  # fmt: skip
DROPPED = "notification_dropped"
KEEP_S = 24 * 3600.0
"""A message that was not taken for so long is dropped."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 3600.0
POLL_S = 2.0
PASSED_OVER = 200
"""So many events of which nobody is told may lie before the next one that is: each look goes through them."""
PASS_OVER_EACH_S = 60.0
AT_ONCE = 16
"""Addresses that are spoken to at the same time."""


def wait_s(attempts: int, chance: float) -> float:
    """Seconds until the next try after so many failures: doubling, up to an hour, ±50 % by `chance` (0…1)."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempts - 1, 20)) * (0.5 + chance))


def secret_of(settings: Settings) -> SecretStr | None:
    """What notifications are signed with."""
    return settings.notify_secret or settings.webhook_secret


def message(event: Event) -> tuple[str, bytes]:
    """Id and body of the message that tells an event."""
    at = datetime.fromtimestamp(event.at, UTC)
    data = {"job_id": event.job_id, "event_id": event.id, "message": event.message, "details": event.data}
    body = {"type": event.kind, "timestamp": rfc3339(at), "data": data}
    return f"msg_{event.job_id}_{event.id}", json.dumps(body, ensure_ascii=False).encode()


class Notifier:
    """Delivers. A job's address that does not answer keeps only this job's messages waiting."""

    def __init__(self, core: Core, outward: Outward, chance: Callable[[], float] = random.random) -> None:
        self.core = core
        self.outward = outward
        self.chance = chance
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to deliver in the background."""
        self._watch = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop; what is under way is cut and comes again, with the same id, at the next start."""
        tasks = [t for t in (self._watch, *self._busy.values()) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.outward.aclose()

    async def _run(self) -> None:
        passed_over = self.core.clock()
        while True:
            try:
                await self.begin()
                if self.core.clock() - passed_over >= PASS_OVER_EACH_S:
                    passed_over = self.core.clock()
                    await self.pass_over()
            except (OSError, SQLAlchemyError) as error:
                log.warning("notifications wait: %s", error)
            await asyncio.sleep(POLL_S)

    async def begin(self) -> list[asyncio.Task[None]]:
        """Start a delivery for every job that has something to tell now and none under way."""
        if secret_of(self.core.settings) is None:
            return []
        due = [job_id for job_id in await self._due() if job_id not in self._busy]
        for job_id in due[: AT_ONCE - len(self._busy)]:
            task = asyncio.create_task(self._guarded(job_id))
            self._busy[job_id] = task
        return list(self._busy.values())

    async def pass_over(self) -> None:
        """Put the marks of jobs that have nothing to tell behind the events of which nobody is told: else a look costs
        more with each of them."""
        newest = select(func.max(Event.id)).where(Event.job_id == Outbox.job_id).scalar_subquery()
        untold = select(Event.id).where(Event.job_id == Outbox.job_id, Event.id > Outbox.event_id, _told())
        behind = select(Outbox.job_id).where(newest - Outbox.event_id > PASSED_OVER, ~untold.exists())
        async with self.core.db.read() as session:
            if (await session.scalars(behind.limit(1))).first() is None:
                return
        async with self.core.db.write() as session:
            for row in await session.scalars(select(Outbox).where(Outbox.job_id.in_(behind))):
                mine = select(func.max(Event.id)).where(Event.job_id == row.job_id)
                row.event_id = int(await session.scalar(mine) or row.event_id)

    async def sweep(self) -> None:
        """Deliver what can be delivered now, and return when that is done."""
        await asyncio.gather(*await self.begin())

    async def _due(self) -> list[str]:
        """Jobs with an untold event whose time has come, the longest waiting first. Old jobs are silent."""
        now = self.core.clock()
        awake = Job.status.not_in(list(FINAL_STATUSES)) | (Job.finished_at > now - 2 * KEEP_S)
        query = (
            select(Outbox.job_id)
            .join(Job, Job.id == Outbox.job_id)
            .where(Outbox.next_at <= now, awake)
            .where(select(Event.id).where(Event.job_id == Outbox.job_id, Event.id > Outbox.event_id, _told()).exists())
            .order_by(Outbox.next_at)
        )
        async with self.core.db.read() as session:
            return list(await session.scalars(query))

    async def _guarded(self, job_id: str) -> None:
        try:
            await self._deliver(job_id)
        except (OSError, SQLAlchemyError) as error:
            log.warning("%s: its notifications wait: %s", job_id, error)
        finally:
            self._busy.pop(job_id, None)

    async def _deliver(self, job_id: str) -> None:
        """One event after the other, until none is left or one is not taken."""
        while True:
            async with self.core.db.read() as session:
                row = await session.get_one(Outbox, job_id)
                spec = await session.scalar(select(Job.spec).where(Job.id == job_id))
                query = select(Event).where(Event.job_id == job_id, Event.id > row.event_id, _told())
                event = (await session.scalars(query.order_by(Event.id).limit(1))).first()
            if event is None or spec is None:
                return
            problem = await self._post(str(spec["notify_url"]), event)
            if not await self._note(event, problem):
                return

    async def _post(self, url: str, event: Event) -> str:
        """Send one message; what went wrong, or nothing. The text never holds the address: its query may be a key."""
        secret = secret_of(self.core.settings)
        if secret is None:
            return "there is no secret to sign with"
        message_id, body = message(event)
        sent = datetime.fromtimestamp(int(self.core.clock()), UTC)
        signature = Webhook(secret.get_secret_value()).sign(msg_id=message_id, timestamp=sent, data=body.decode())
        headers = {
            "content-type": "application/json",
            "user-agent": "echo2",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(sent.timestamp())),
            "webhook-signature": signature,
        }
        try:
            status = await self.outward.post(url, body, headers)
        except Forbidden as error:
            return str(error)
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            return f"no answer ({type(error).__name__})"
        return "" if 200 <= status < 300 else f"answered {status}"

    async def _note(self, event: Event, problem: str) -> bool:
        """Write down how it went. True if the next event may follow at once."""
        now = self.core.clock()
        async with self.core.db.write() as session:
            row = await session.get_one(Outbox, event.job_id)
            if problem and now - event.at < KEEP_S:
                row.attempts += 1
                row.next_at = now + wait_s(row.attempts, self.chance())
                log.warning("%s: event %d was not delivered: %s", event.job_id, event.id, problem)
                return False
            row.event_id = event.id
            row.attempts = 0 if not problem else row.attempts
            # Its end is no news of its own: else a dead address would be told of every end, for ever.
            if problem and event.kind != DROPPED:
                told = f"the notification of event {event.id} ({event.kind}) was given up after a day: {problem}"
                self.core.emit(session, event.job_id, DROPPED, told, event=event.id)
        if event.job_id is not None:
            self.core.announce(event.job_id)
        return True


def _told() -> ColumnElement[bool]:
    starts = [Event.kind.startswith(prefix, autoescape=True) for prefix in TOLD]
    return or_(Event.kind.in_(TOLD_TOO), *starts)
