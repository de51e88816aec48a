"""What the parts of the control service share: database, clock, providers, signals, derived secrets.

Invariant: nothing here decides anything. A signal is only a hint that the database changed; who misses one finds out
at the next timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money
from app.fleet.idle import Idle
from app.fleet.metrics import Metrics
from app.fleet.storewatch import StoreWatch
from app.fleet.waiting import Waits
from app.fleet.weights import Told
from app.settings import Settings
from app.storage.database import Database
from app.storage.models import Event, LeaseState
from app.storage.objects import ObjectStore
from providers.base import Provider

TOLD_S = 10.0
"""So long a price that was told counts, whatever a list says: lists lag behind, and one may have been asked before."""

log = logging.getLogger("echo2")
Topic = Literal["work", "rollouts"]


class Signals:
    """Named wake-ups inside this process."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def notify(self, name: str) -> None:
        """Wake everybody who waits for `name`."""
        event = self._events.pop(name, None)
        if event is not None:
            event.set()

    def subscribe(self, name: str) -> asyncio.Event:
        """An event that the next notify sets. Take it before looking at the database, so that none is missed."""
        return self._events.setdefault(name, asyncio.Event())

    @staticmethod
    async def wait(event: asyncio.Event, timeout_s: float) -> bool:
        """True if it was set in time."""
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Secrets:
    """Tokens that are derived, so that none of them has to be stored."""

    key: bytes = field(repr=False)

    def derive(self, purpose: str, subject: str) -> str:
        """A token for one purpose and one subject; 256 bits, hex."""
        return hmac.new(self.key, f"{purpose}:{subject}".encode(), hashlib.sha256).hexdigest()

    def learner_token(self, job_id: str) -> str:
        """Bearer of the job's learner."""
        return "lt_" + self.derive("learner", job_id)

    def relay_token(self, job_id: str) -> str:
        """Bearer that relays of this job ask of each other."""
        return "rt_" + self.derive("relay", job_id)

    def signing_key(self) -> bytes:
        """Key of presigned URLs of the folder store."""
        return bytes.fromhex(self.derive("objects", ""))


@dataclass
class Core:
    """Handed to every service."""

    db: Database
    settings: Settings
    providers: Mapping[str, Provider]
    objects: ObjectStore
    secrets: Secrets
    clock: Callable[[], float]
    metrics: Metrics
    signals: Signals = field(default_factory=Signals)
    held: dict[str, str] = field(default_factory=dict)
    """Job → why nothing more is rented for it, though it needs more: it waits, and nothing is wrong with it."""
    benched: Mapping[str, float] = field(default_factory=dict)
    """GPU model → what was measured by hand over what its data sheet promises."""
    waits: Waits = field(default_factory=Waits)
    """What this process has counted of nodes that wait for work."""
    idle: Idle = field(default_factory=Idle)
    """Which of them ask for none, or hand nothing in."""
    weights: Told = field(default_factory=Told)
    """What engines said of the weights that they hold."""
    told: dict[str, float] = field(default_factory=dict)
    """Lease → when a webhook last told the price of its machine."""
    started_at: float = 0.0
    """When this process began: nobody is lost for silence while nobody listened."""
    store: StoreWatch = field(init=False)
    """Whether the object store can be used."""

    def __post_init__(self) -> None:
        self.store = StoreWatch(self.objects, self.clock)

    def wind_down_s(self, leases: Iterable[money.Costed]) -> float:
        """How long it takes to give these back, those that are over left out: the setting, and what they wait for each
        other where a provider takes destroy calls one by one."""
        open_at = [x.provider for x in leases if LeaseState(x.state).open and x.ended_at is None]
        each_s = {name: provider.caps.release_each_s for name, provider in self.providers.items()}
        return self.settings.wind_down_seconds + money.queue_s(open_at, each_s)

    def emit(self, session: AsyncSession, job_id: str | None, kind: str, message: str, **data: Any) -> None:
        """Write an event in the caller's transaction; whoever streams events is woken by the caller's `announce`.

        `message` may hold what a node or a provider said: it is one line of printable text from here on.
        """
        message = "".join(c if c.isprintable() else " " for c in message)
        session.add(Event(job_id=job_id, at=self.clock(), kind=kind, message=message, data=data))
        log.info("%s %s %s", job_id or "-", kind, message)

    def announce(self, job_id: str, *topics: Topic) -> None:
        """Wake who waits for news of this job: always its event streams, and those who wait for one of `topics`.

        `work`: admission may let more out. `rollouts`: more were accepted. Waking everybody for everything would make
        each commit cost a look at the database by every node that waits.
        """
        for name in ("job", *topics):
            self.signals.notify(f"{name}:{job_id}")
