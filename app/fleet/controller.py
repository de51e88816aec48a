"""The closed loop of one job: observe → estimate → decide → act.

Invariant: a tick reads the database, decides with the pure functions, and writes what it decided before anybody is
asked to do it; a tick that is repeated, or that dies at any point, does no harm.
"""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import activation, capacity, estimates, sight, steering
from app.fleet.accounts import Accounts
from app.fleet.bidding import Bidding
from app.fleet.core import Core
from app.fleet.leases import Choice, Leases
from app.fleet.lifecycle import Lifecycle
from app.fleet.market import Market, matches
from app.fleet.nodes import Nodes
from app.fleet.ranking import JobView, Ranking
from app.fleet.spending import Spending
from app.fleet.work import Work
from app.protocol.base import usd
from app.protocol.job import JobSpec, JobStatus
from app.protocol.node import NodeState
from app.storage.models import Job, Lease, LeaseState, Node, SpotPrice, Step

log = logging.getLogger(__name__)

URGENT = 0.7
"""A pool below this share of its target is filled at once."""
LOOPING = (JobStatus.PROVISIONING, JobStatus.RUNNING)


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
        self._patience = activation.Patience()
        self._short: dict[str, str] = {}
        """Job → what it was last told about being short of capacity, so that it is told once."""
        self.bidding = Bidding(core, leases, market, nodes)

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
        leases = list(await session.scalars(select(Lease).where(Lease.job_id == job_id)))
        nodes = {n.lease_id: n for n in await session.scalars(select(Node).where(Node.job_id == job_id))}
        return sight.Seen(job, JobSpec.model_validate(job.spec), leases, nodes)

    async def decide(self, job_id: str, why: str) -> None:
        """Estimate, decide, write down, act."""
        async with self._deciding:
            await self._decide(job_id, why)

    async def _decide(self, job_id: str, why: str) -> None:
        async with self.core.db.write() as session:
            seen = await self._observe(session, job_id)
            if seen.job.status not in LOOPING or seen.job.t_train is None:
                return
            await self.nodes.expire(session, seen.job)
            await self.work.expire(session, seen.job)
            view = await self.market.informed(session, sight.job_view(seen))
            ranked = await self.market.ranked(session, view)
            await self._retire_replaced(session, seen)
            target = await self._capacity(session, seen)
            choices, retire = await self._act(session, seen, view, ranked, target, why)
        if choices:
            for choice in choices:
                self.market.forget(choice.offer)
            await self.leases.rent(job_id, choices, retire)
        self.core.announce(job_id, "work")

    async def _capacity(self, session: AsyncSession, seen: sight.Seen) -> float:
        """Eq. 2 with what is measured, what the pool delivers, and the aim that follows; kept for the API.
        Returns the aim."""
        job, spec = seen.job, seen.spec
        t_bcast = job.t_bcast if job.t_bcast is not None else self._broadcast_prior(seen)
        need = capacity.plan(
            rollouts=spec.rollouts_per_step,
            kappa=job.publish_period,
            staleness=job.staleness_budget,
            gamma=spec.safety_factor,
            t_train=job.t_train or 1.0,
            t_bcast=t_bcast,
        )
        active = [n for n in seen.nodes.values() if n.state == NodeState.ACTIVE]
        was_feasible = job.capacity.get("feasible")
        aim = await self._steer(session, job, spec, need.mu_target)
        job.capacity = {
            **need.as_dict(),
            "mu_pool": sum(n.mu_measured or 0.0 for n in active),
            "mu_steered": aim.target,
            "mu_knee": aim.knee,
            "steering": aim.why,
            "steering_state": [aim.factor, aim.since_step],
            "nodes_active": len(active),
            "t_train": job.t_train,
            "t_bcast": t_bcast,
        }
        job.nodes_peak = max(job.nodes_peak, len(active))
        metrics = self.core.metrics
        metrics.mu_pool.labels(job.id).set(job.capacity["mu_pool"])
        metrics.mu_target.labels(job.id).set(need.mu_target)
        metrics.mu_steered.labels(job.id).set(aim.target)
        metrics.mu_min.labels(job.id).set(need.mu_min or 0.0)
        if need.feasible != was_feasible and not (need.feasible and was_feasible is None):
            kind = "capacity_feasible" if need.feasible else "capacity_infeasible"
            self.core.emit(
                session, job.id, kind, need.explanation or "the broadcast fits into the publish period again"
            )
        return aim.target

    async def _steer(self, session: AsyncSession, job: Job, spec: JobSpec, eq2: float) -> steering.Aim:
        """The aim by what the newest steps showed; a move of it is an event."""
        state = job.capacity.get("steering_state", [None, 0])
        query = select(Step).where(Step.job_id == job.id).order_by(Step.step.desc()).limit(steering.LONGEST_WINDOW)
        steps = [
            steering.Seen(s.step, s.t_train, s.t_idle, s.rollouts, s.dropped, s.mu_pool)
            for s in reversed(list(await session.scalars(query)))
        ]
        aim = steering.steer(
            (state[0], state[1]),
            eq2=eq2,
            rollouts=spec.rollouts_per_step,
            gamma=spec.safety_factor,
            t_train=job.t_train or 1.0,
            kappa=job.publish_period,
            steps=steps,
            bound=self.core.settings.bubble_bound,
        )
        if aim.moved:
            self.core.emit(
                session, job.id, "capacity_steered",
                f"the pool is held at {aim.target:.4g} rollouts/s (Eq. 2: {eq2:.4g}, R/T_train: {aim.knee:.4g}): "
                f"{aim.why}",
            )  # fmt: skip
        return aim

    def _broadcast_prior(self, seen: sight.Seen) -> float:
        """T_bcast before one was measured."""
        links = [min(x.up_mbps, x.down_mbps) for x in seen.usable if x.up_mbps and x.down_mbps]
        size = seen.job.publish_bytes or seen.job.snapshot_bytes or 0
        uplink = self.core.settings.learner_uplink_mbps
        return estimates.broadcast_time(size, max(1, len(links)), uplink, min(links, default=min(uplink, 100.0)))

    async def _act(
        self, session: AsyncSession, seen: sight.Seen, view: JobView, ranked: Ranking, target: float, why: str
    ) -> tuple[list[Choice], list[str]]:
        """Turn the pure decision into intents, drains and bids. Returns what to rent and what that retires."""
        now, job = self.core.clock(), seen.job
        room = await self.accounts.room(session, self.bidding.sent)
        if await self.spending.give_back(session, seen, room):
            return [], []
        most = sight.trust(view, target, self.core.settings.first_nodes)
        held = [x for x in seen.usable if not x.retire_after]
        running = [sight.running(x, seen, view, now, most, self.bidding.outlook(x)) for x in held]
        await self.bidding.warn(session, held, running, view.cap)
        wanted = ranked.wanted
        depth = max(1, job.max_nodes) + len(running)
        market = wanted.candidates(depth, most=most, allows=lambda name, price: not room.why_not(name, price))
        slots = job.max_nodes - (len(seen.usable) - len(running))
        policy = activation.Policy(
            # γ is the reserve above what is needed: only when it is used up is there something to do.
            rent_below=1 / seen.spec.safety_factor,
            min_life_s=self.core.settings.min_lease_seconds,
            switch_s=view.setup_s,
            life_h=1.0,
        )
        decision = activation.decide(running, market, target, slots, policy)
        if why != "tick":
            self._tell_rerank(session, seen, ranked, decision, why)
        planned = sum(r.candidate.mu for r in running)
        urgent = why != "tick" or planned < URGENT * target or len(running) > slots
        urgent = urgent or any(
            r.endangered or r.ending or (r.outbid and r.candidate.key not in decision.rebid) for r in running
        )
        for lease in held:
            if lease.id in decision.rebid:
                room = self.bidding.keep(session, lease, view.cap, decision.limits.get(lease.id), room)
            else:
                self.bidding.ease(session, lease, view.cap)
        wait_s = self.core.settings.min_lease_seconds / 4
        if not self._patience.allows(job.id, decision, now, wait_s, urgent=urgent):
            decision = activation.Decision()
        for key, reason in decision.release:
            await self.bidding.let_go(session, await session.get_one(Lease, key), running)
            await self.nodes.retire(session, await session.get_one(Lease, key), reason)
        offers = [wanted.of(c.key, decision.limits.get(c.key)) for c in decision.rent]
        choices, left = self.spending.affordable(session, seen, offers, room)
        if decision.rent and not choices and not seen.usable:
            self.spending.cannot_pay(session, seen, offers[0])
        short = planned + sum(min(c.mu, most) for c in choices) < target * policy.rent_below
        self.spending.hold(session, seen, wanted, choices, left, short and len(running) + len(choices) < slots)
        self._tell_shortage(session, seen, decision, target, bool(choices))
        # What is retired leaves once its replacement works; if that was not affordable, it stays.
        if not choices:
            return choices, []
        for key, reason in decision.retire:
            lease = await session.get_one(Lease, key)
            what = f"{lease.gpu_name} will be given back once what takes its place works: {reason}"
            self.core.emit(session, job.id, "lease_leaving", what, lease=key)
            await self.bidding.let_go(session, lease, running)
        return choices, [key for key, _ in decision.retire]

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
            self._tell_once(session, seen.job.id, "no_offers", "no offer that the job may rent; see /v1/offers for why")

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
            jobs = list(await session.scalars(select(Job).where(Job.status.in_(LOOPING))))
            for job in jobs:
                job.price_events += 1
        for job in jobs:
            what = ", ".join(f"{k} {v}" for k, v in row.selector.items()) or "all"
            await self.decide(job.id, f"a spot price of ${usd(row.micros_h)}/h for {what} at {provider}")
