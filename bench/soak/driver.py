"""The control side of the soak: `python -m bench.soak.driver FOLDER`. It is killed at any instant and started again.

Everything that touches money is the service's own: leases, reconciliation, budget, ledger, activation. Played are the
learner (never there, always content) and the nodes (machines only sleep, so none joins): a lease ends when its time is
over, when it is pre-empted, or when its job has no money left.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.deps import Services
from app.fleet.bills import GIVE_UP_S
from app.fleet.core import Core
from app.fleet.estimates import Workload, prior
from app.fleet.supervisor import Supervisor
from app.main import build_services
from app.protocol.job import FINAL_STATUSES, JobSpec, JobStatus
from app.settings import Settings
from app.storage.models import OPEN_STATES, Job, Lease, LeaseState, ProviderBill, Step
from bench.soak.clock import SharedClock
from bench.soak.place import FLEET, KEY, NODES, STEP_S, Place
from providers.base import Offer, ProviderError, RentResult, RentSpec
from providers.vastai import VastAI

PARAMETERS = 8_000_000_000
ONSTART = "exec sleep 100000"
SHORTEST_S, LONGEST_S = 60.0, 500.0
STEP_EVERY_S = 300.0
QUIET_ROUNDS, LONG_STEP_S = 12, 600.0
RICH_USD = "100000"
POOR_USD = (0.02, 0.40)


class Market(VastAI):
    """The adapter as it is, but for what the machines run."""

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One create call."""
        return await super().rent(offer, replace(spec, onstart=ONSTART))


class NoLearner(Supervisor):
    """A learner that needs no process."""

    def alive(self, job: Job) -> bool:
        """Always."""
        return True

    async def start(self, job_id: str) -> None:
        """Nothing to start."""

    def stop(self, job: Job) -> None:
        """Nothing to stop."""


def life_s(lease_id: str) -> float:
    """How long a lease is wanted; its own, so that it outlives this process."""
    return random.Random(lease_id).uniform(SHORTEST_S, LONGEST_S)


def open_services(place: Place, clock: SharedClock) -> Services:
    """The control service, without its HTTP side."""
    settings = Settings(
        state_dir=place.control,
        database_url=f"sqlite+aiosqlite:///{place.database}",
        fleet_id=FLEET,
        tick_seconds=STEP_S,
        offer_refresh_seconds=STEP_S,
        reconcile_seconds=STEP_S,
        settle_seconds=90,
        join_timeout_seconds=3600,
        min_lease_seconds=60,
        wind_down_seconds=60,
        charges_seconds=300,
        first_nodes=NODES,
        public_url="http://127.0.0.1:9",
    )

    async def briefly(seconds: float) -> None:
        # The market's clock stands still meanwhile: the wait is only for the order of things.
        await asyncio.sleep(min(seconds, 0.02))

    market = Market(
        "marketplace", place.url.read_text(), KEY, interval_scale=0.0, sleep=briefly,
        clock=lambda: datetime.fromtimestamp(clock(), UTC),
    )  # fmt: skip

    def supervise(core: Core) -> Supervisor:
        return NoLearner(core)

    return build_services(settings, providers={"marketplace": market}, clock=clock, supervisor=supervise)


class Director:
    """Keeps two jobs going, a rich one and a poor one, and says which leases are over."""

    def __init__(self, svc: Services, clock: SharedClock, rng: random.Random) -> None:
        self.svc = svc
        self.clock = clock
        self.rng = rng

    async def jobs(self) -> None:
        """A job of each kind, if there is none."""
        async with self.svc.core.db.read() as session:
            live = list(await session.scalars(select(Job.name).where(Job.status.not_in(list(FINAL_STATUSES)))))
        if "rich" not in live:
            await self._create("rich", RICH_USD, interruptible=True)
        if "poor" not in live:
            await self._create("poor", f"{self.rng.uniform(*POOR_USD):.6f}", interruptible=self.rng.random() < 0.5)

    async def _create(self, name: str, budget_usd: str, *, interruptible: bool) -> None:
        spec = JobSpec.model_validate({
            "name": name, "model": "tiny", "task": {"name": "reasoning_gym"}, "budget_usd": budget_usd,
            "stop": {"steps": 1_000_000},
            "fleet": {"interruptible": interruptible, "max_nodes": NODES, "min_reliability": 0.0},
        })  # fmt: skip
        job = await self.svc.jobs.create(spec, "soak", None)
        guess = prior("RTX 3090", 1, Workload(PARAMETERS, float(min(spec.sampling.max_tokens, 512)))).mu
        async with self.svc.core.db.write() as session:
            row = (await session.scalars(select(Job).where(Job.id == job.id))).one()
            row.ready_at, row.published_version = self.clock(), 0
            row.parameters, row.snapshot_bytes = PARAMETERS, 1000
            row.t_train = spec.rollouts_per_step / (guess * NODES)

    async def tend(self, finish: bool) -> None:
        """Play learner and nodes for one round."""
        now = self.clock()
        async with self.svc.core.db.write() as session:
            for job in await session.scalars(select(Job).where(Job.status.not_in(list(FINAL_STATUSES)))):
                if finish or job.status == JobStatus.DRAINING:
                    job.learner_done = True
                await self._step(session, job, now)
            wanted = select(Lease).where(Lease.state.in_([LeaseState.BOOTING, LeaseState.ACTIVE]))
            for lease in await session.scalars(wanted):
                if now - lease.created_at > life_s(lease.id):
                    self.svc.controller.leases.request_release(session, lease, "its time is over")

    @staticmethod
    async def _step(session: AsyncSession, job: Job, now: float) -> None:
        last = await session.scalar(select(func.max(Step.at)).where(Step.job_id == job.id))
        if last is not None and now - last < STEP_EVERY_S:
            return
        job.step += 1
        session.add(
            Step(
                job_id=job.id, step=job.step, at=now, t_train=1.0, t_idle=0.0, reward=0.0, rollouts=1, dropped=0,
                lags={}, metrics={}, nodes=1, mu_pool=1.0, spent_micros=0,
            )
        )  # fmt: skip

    async def over(self) -> bool:
        """Whether nothing is left: no lease here, no instance there."""
        async with self.svc.core.db.read() as session:
            leases = await session.scalar(select(func.count()).where(Lease.state.in_(OPEN_STATES)))
            jobs = await session.scalar(select(func.count()).where(Job.status.not_in(list(FINAL_STATUSES))))
        if leases or jobs:
            return False
        try:
            listing = await self.svc.core.providers["marketplace"].list()
        except ProviderError:
            return False
        return listing.complete and not any(i.label.startswith(f"echo2:{FLEET}:") for i in listing.instances)

    async def settled(self) -> bool:
        """Whether every bill was read to its end; one that names a lease not even once is not waited for for ever."""
        async with self.svc.core.db.read() as session:
            read = select(ProviderBill.lease_id).where(ProviderBill.final)
            waiting = Lease.exists_since.is_not(None) & (Lease.ended_at > self.clock() - GIVE_UP_S)
            return not await session.scalar(select(func.count()).where(waiting, Lease.id.not_in(read)))


async def main(place: Place) -> None:
    """Rounds until everything is over."""
    clock = SharedClock(place.clock)
    svc = open_services(place, clock)
    svc.jobs.take_task = lambda task, job_id: task
    director = Director(svc, clock, random.Random(clock.now_ns()))
    await svc.core.db.migrate()
    quiet = 0
    while True:
        finish = place.finish.exists()
        if not finish:
            await director.jobs()
        await svc.loop.round()
        await svc.controller.leases.drain_tasks()
        await director.tend(finish)
        quiet = quiet + 1 if finish and await director.over() else 0
        # Ghosts and strangers would show in the next lists; a bill may take hours until it counts as complete.
        if quiet >= QUIET_ROUNDS and await director.settled():
            break
        clock.advance(STEP_S if quiet < QUIET_ROUNDS else LONG_STEP_S)
    await svc.core.db.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(main(Place(Path(sys.argv[1]))))
