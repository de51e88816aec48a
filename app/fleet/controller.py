"""The closed loop of one job: observe → estimate → decide → act.

Invariant: a tick reads the database, decides with the pure functions, and writes what it decided before anybody is
asked to do it; a tick that is repeated, or that dies at any point, does no harm.
"""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import activation, sight
from app.fleet.accounts import Accounts
from app.fleet.bidding import Bidding
from app.fleet.books import books
from app.fleet.choice import Choice
from app.fleet.core import Core
from app.fleet.demand import Demand
from app.fleet.leases import RENTING, Leases
from app.fleet.lifecycle import RENTS, Lifecycle
from app.fleet.market import Market, matches
from app.fleet.nodes import Nodes
from app.fleet.priced import JobView
from app.fleet.purse import Room
from app.fleet.ranking import Ranking
from app.fleet.spending import Spending
from app.fleet.weighed import Weighed
from app.fleet.work import Work
from app.protocol.base import usd
from app.protocol.errors import Unavailable
from app.protocol.job import JobSpec, JobStatus
from app.protocol.node import NodeState
from app.storage.models import Job, Lease, LeaseState, Node, SpotPrice

log = logging.getLogger(__name__)

LOOPING = RENTING
WAITS = "waits for machines: "
NO_OFFERS = "no offer that the job may rent; see /v1/offers for why"


class Controller:
    """Holds every job's pool at its target."""

    def __init__(
        self,
        core: Core,
        market: Market,
        leases: Leases,
        nodes: Nodes,
        work: Work,
        lifecycle: Lifecycle,
        accounts: Accounts,
    ) -> None:
        self.core = core
        self.market = market
        self.leases = leases
        self.nodes = nodes
        self.work = work
        self.lifecycle = lifecycle
        self.accounts = accounts
        self.spending = Spending(core, accounts, nodes, lifecycle)
        self._deciding = asyncio.Lock()
        """From looking to the committed intents: two decisions at once would both fill the same gap."""
        self._asked: set[str] = set()
        """Jobs for which prices have asked for a decision that has not begun."""
        self._patience = activation.Patience()
        self._short: dict[str, str] = {}
        """Job → what it was last told about being short of capacity, so that it is told once."""
        self.bidding = Bidding(core, leases, market, nodes)
        self.demand = Demand(core)

    async def tick(self, job_id: str) -> None:
        """One round for one job."""
        await self.lifecycle.tick(job_id)
        seen = await self.observe(job_id)
        if seen.job.status not in LOOPING or seen.job.ready_at is None or seen.job.published_version is None:
            self.core.held.pop(job_id, None)
            return
        names = seen.spec.fleet.providers or list(self.core.providers)
        await self.market.refresh(
            names, seen.spec.fleet.interruptible, max_age_s=self.core.settings.offer_refresh_seconds
        )
        await self.decide(job_id, "tick")

    async def observe(self, job_id: str) -> sight.Seen:
        """The job, its leases and their nodes."""
        async with self.core.db.read() as session:
            return await self._observe(session, job_id)

    async def _observe(self, session: AsyncSession, job_id: str) -> sight.Seen:
        job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
        found = await books(session, job_id)
        known = [x.id for x in found.leases]
        nodes = {n.lease_id: n for n in await session.scalars(select(Node).where(Node.lease_id.in_(known)))}
        return sight.Seen(job, JobSpec.model_validate(job.spec), found.leases, nodes, found.before)

    async def decide(self, job_id: str, why: str) -> None:
        """Estimate, decide, write down, act."""
        async with self._deciding:
            # What was written until now is seen: whoever waits for a decision on it has it.
            self._asked.discard(job_id)
            try:
                await self.core.db.keep_claim()
            except Unavailable as error:
                log.error("nothing is decided for %s: %s", job_id, error.detail)
                return
            await self._decide(job_id, why)

    async def decide_once(self, job_id: str, why: str) -> None:
        """The same; nothing if a decision that was asked for so has not begun yet: it will see all that this would."""
        if job_id not in self._asked:
            self._asked.add(job_id)
            await self.decide(job_id, why)

    async def _decide(self, job_id: str, why: str) -> None:
        async with self.core.db.write() as session:
            seen = await self._observe(session, job_id)
            if seen.job.status not in LOOPING or seen.job.t_train is None:
                return
            await self.nodes.expire(session, seen.job)
            await self.work.expire(session, seen.job)
            if seen.job.outcome is not None:
                return  # the next tick ends it
            view = await self.market.informed(session, sight.job_view(seen, self.core.benched))
            ranked = await self.market.ranked(session, view)
            await self._retire_replaced(session, seen)
            target = await self.demand.aim(session, seen)
            choices, retire = await self._act(session, seen, view, ranked, target, why)
        if choices:
            for choice in choices:
                self.market.forget(choice.offer)
            await self.leases.rent(job_id, choices, retire)
        self.core.announce(job_id, "work")

    async def _act(
        self, session: AsyncSession, seen: sight.Seen, view: JobView, ranked: Ranking, target: float, why: str
    ) -> tuple[list[Choice], list[str]]:
        """Turn the pure decision into intents, drains and bids. Returns what to rent and what that retires."""
        room = await self.accounts.room(session, self.bidding.sent)
        if await self.spending.give_back(session, seen, room):
            return [], []
        weighed = await self._weigh(session, seen, view, ranked, target, room)
        decision, held = weighed.decision, {x.id: x for x in seen.leases}
        if why != "tick":
            self._tell_rerank(session, seen, ranked, decision, why)
        spare = self.spending.spare(seen, self.bidding.sent)
        for lease in (held[r.candidate.key] for r in weighed.running):
            if lease.id in decision.rebid:
                before, worth = room.burn, decision.limits.get(lease.id)
                room = self.bidding.keep(lease, view.cap, worth, room, spare)
                spare -= room.burn - before
            else:
                self.bidding.ease(lease, view.cap)
        urgent = why != "tick" or weighed.urgent
        wait_s = self.core.settings.min_lease_seconds / 4
        if not self._patience.allows(seen.job.id, decision, self.core.clock(), wait_s, urgent=urgent):
            decision = activation.Decision()
        for key, reason in decision.release:
            await self.bidding.let_go(session, held[key], weighed.running)
            await self.nodes.retire(session, held[key], reason)
        choices = self._afford(session, seen, weighed, decision, room)
        self._tell_shortage(session, seen, decision, target, bool(choices))
        # What is retired leaves once its replacement works; if that was not affordable, it stays.
        if not choices:
            return choices, []
        for key, reason in decision.retire:
            what = f"{held[key].gpu_name} will be given back once what takes its place works: {reason}"
            self.core.emit(session, seen.job.id, "lease_leaving", what, lease=key)
            await self.bidding.let_go(session, held[key], weighed.running)
        return choices, [key for key, _ in decision.retire]

    async def _weigh(
        self, session: AsyncSession, seen: sight.Seen, view: JobView, ranked: Ranking, target: float, room: Room
    ) -> Weighed:
        """What runs, what the market offers, and the pure decision between them."""
        most = sight.trust(view, target, self.core.settings.first_nodes)
        held = [x for x in seen.usable if not x.retire_after]
        now = self.core.clock()
        running = [sight.running(x, seen, view, now, most, self.bidding.outlook(x)) for x in held]
        self.bidding.warn(session, held, running)
        await self.bidding.end(session, seen.usable, view.cap)
        depth = max(1, seen.job.max_nodes) + len(running)
        wanted = ranked.wanted
        market = wanted.candidates(depth, most=most, allows=lambda name, price: not room.why_not(name, price))
        slots = seen.job.max_nodes - (len(seen.usable) - len(running))
        policy = activation.Policy(
            # γ is the reserve above what is needed: only when it is used up is there something to do.
            rent_below=1 / seen.spec.safety_factor,
            min_life_s=self.core.settings.min_lease_seconds,
            switch_s=view.setup_s,
            life_h=1.0,
            lasting=seen.job.capacity["mu_lasting"],
        )
        decision = activation.decide(running, market, target, slots, policy)
        return Weighed(running, wanted, decision, slots, most, target, policy)

    def _afford(
        self,
        session: AsyncSession,
        seen: sight.Seen,
        weighed: Weighed,
        decision: activation.Decision,
        room: Room,
    ) -> list[Choice]:
        """Of what is to be rented, what the money allows; what is held back is told."""
        offers = [weighed.wanted.of(c.key, decision.limits.get(c.key)) for c in decision.rent]
        wanted = weighed.wanted
        choices, left = self.spending.affordable(session, seen, offers, wanted, room, self.bidding.sent)
        if decision.rent and not choices and not seen.usable:
            self.spending.cannot_pay(session, seen, wanted)
        planned = weighed.planned + sum(min(c.mu, weighed.most) for c in choices)
        short = planned < weighed.target * weighed.policy.rent_below
        free = len(weighed.running) + len(choices) < weighed.slots
        self.spending.hold(session, seen, weighed.wanted, choices, left, short and free)
        return choices

    async def _retire_replaced(self, session: AsyncSession, seen: sight.Seen) -> None:
        """Leases whose replacements work are drained; those whose replacements failed stay."""
        by_id = {x.id: x for x in seen.leases}
        for lease in seen.usable:
            if not lease.retire_after:
                continue
            heirs = [by_id[i] for i in lease.retire_after if i in by_id]
            alive = [h for h in heirs if LeaseState(h.state).usable]
            working = [h for h in alive if h.id in seen.nodes and seen.nodes[h.id].state == NodeState.ACTIVE]
            if not alive:
                lease.retire_after = []
            elif len(working) == len(alive):
                await self.nodes.retire(session, lease, "its replacement works")

    def _tell_rerank(
        self, session: AsyncSession, seen: sight.Seen, ranked: Ranking, decision: activation.Decision, why: str
    ) -> None:
        best = [f"{p.offer.gpu_name} ρ={p.rho:.3g}" for p in ranked.wanted[:3]]
        self.core.emit(
            session, seen.job.id, "reranked",
            f"re-ranked after {why}; best offers: {', '.join(best) or 'none'}; rent {len(decision.rent)}, "
            f"release {len(decision.release) + len(decision.retire)}, raise {len(decision.rebid)} bids",
        )  # fmt: skip

    def _tell_shortage(
        self,
        session: AsyncSession,
        seen: sight.Seen,
        decision: activation.Decision,
        target: float,
        renting: bool,
    ) -> None:
        waits = not seen.usable and not renting
        held = self.core.held.get(seen.job.id, "")
        self._explain(seen.job, (held or ("" if decision.rent else NO_OFFERS)) if waits else "")
        planned = sum(x.mu_prior for x in seen.usable)
        if renting or decision.rent or (seen.usable and planned >= target):
            return
        if len(seen.usable) >= seen.job.max_nodes:
            self._tell_once(
                session,
                seen.job.id,
                "at_max_nodes",
                f"target {target:.4g} rollouts/s needs more than max_nodes {seen.job.max_nodes}",
            )
        elif not seen.usable:
            self._tell_once(session, seen.job.id, "no_offers", NO_OFFERS)

    def _explain(self, job: Job, why: str) -> None:
        """Why a job has no machines, as long as it has none and gets none."""
        usual = RENTS if job.status == JobStatus.PROVISIONING else ""
        if why:
            job.status_reason = WAITS + why
        elif job.status_reason.startswith(WAITS):
            job.status_reason = usual

    def _tell_once(self, session: AsyncSession, job_id: str, kind: str, message: str) -> None:
        if self._short.get(job_id) != kind:
            self._short[job_id] = kind
            self.core.emit(session, job_id, kind, message)

    async def price_changed(self, provider: str, row: SpotPrice) -> None:
        """A spot price arrived: re-rank every running job at once."""
        async with self.core.db.write() as session:
            for lease in await session.scalars(
                select(Lease).where(Lease.provider == provider, Lease.state.in_([s for s in LeaseState if s.open]))
            ):
                same = matches(
                    row.selector, machine_id=lease.machine_id, offer_id=lease.offer_id, gpu_name=lease.gpu_name,
                    region=lease.region,
                )  # fmt: skip
                if same:
                    lease.market_micros_h = row.micros_h
                    self.core.told[lease.id] = self.core.clock()
            jobs = list(await session.scalars(select(Job).where(Job.status.in_(LOOPING))))
            for job in jobs:
                job.price_events += 1
        for job in jobs:
            what = ", ".join(f"{k} {v}" for k, v in row.selector.items()) or "all"
            await self.decide_once(job.id, f"a spot price of ${usd(row.micros_h)}/h for {what} at {provider}")
