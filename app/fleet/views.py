"""What the API shows, as plain values in the contract's words.

Invariant: money is a decimal string with six places, moments are RFC 3339 in UTC, durations are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money, phases, pricing, starts
from app.fleet.books import Books, books
from app.fleet.capacity import bubble_ratio
from app.fleet.core import Core
from app.fleet.costs import Costs
from app.fleet.measured import learner_link
from app.fleet.publishes import publishes
from app.fleet.replay import dropped_counts
from app.protocol.base import moment, usd
from app.protocol.job import JobStatus
from app.protocol.node import NodeState
from app.storage.models import Event, Job, Lease, LeaseState, LedgerEntry, Node, SnapshotRow, Step

NODE_WAITS: dict[str, str] = {
    NodeState.JOINING: "it loads the model",
    NodeState.WARMING: "it fetches its first policy version",
    NodeState.DRAINING: "it finishes what it began",
}
"""Why a node does not work yet, or not any more, where it says nothing itself."""


def dropped_ratio(job: Job) -> float | None:
    """Share of the decided rollouts that were dropped."""
    decided = job.rollouts_trained + job.rollouts_dropped
    return job.rollouts_dropped / decided if decided else None


def _projected(job: Job, spent: int) -> int | None:
    """What the job will have cost at its step limit if it goes on like this."""
    steps = job.spec["stop"].get("steps")
    if not job.step or not steps:
        return None
    return spent if JobStatus(job.status).final else round(spent / job.step * max(steps, job.step))


def _links(lease: Lease, node: Node | None) -> dict[str, float | None]:
    """Mbit/s of a machine's link: as advertised (null: the provider doesn't tell) and as measured."""
    return {
        "up_mbps": lease.up_mbps or None,
        "up_mbps_measured": node.up_measured if node else None,
        "down_mbps": lease.down_mbps or None,
        "down_mbps_measured": node.down_measured if node else None,
    }


def _start(lease: Lease, now: float) -> dict[str, Any]:
    """How far a machine's start has come, by its own word; nulls while it says nothing."""
    at = starts.standing(lease)
    return {
        "phase": at.phase if at else None,
        "phase_age": round(now - at.since, 3) if at else None,
        "phase_still": round(now - at.moved_at, 3) if at else None,
        "phase_detail": phases.words(at) if at else "",
        "facts": lease.facts,
    }


def _total(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, over nodes that are gone too."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return dict(sorted(found.items()))


class Views:
    """Reads the database for the API."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.costs = Costs(core)

    async def job(self, session: AsyncSession, job: Job) -> dict[str, Any]:
        """A job as read: the spec as posted, with its patches, and the state."""
        found = await books(session, job.id)
        fleet = {**job.spec["fleet"], "max_nodes": job.max_nodes}
        return {
            **job.spec,
            "budget_usd": usd(job.budget_micros),
            "staleness_budget": job.staleness_budget,
            "publish_period": job.publish_period,
            "fleet": fleet,
            "id": job.id,
            "status": job.status,
            "status_reason": job.status_reason,
            "status_since": moment(job.status_since),
            "created_at": moment(job.created_at),
            "started_at": moment(job.started_at),
            "finished_at": moment(job.finished_at),
            "step": job.step,
            "policy_version": job.step,
            "published_version": job.published_version,
            "reward": {
                "train": job.reward_train,
                "eval": job.reward_eval,
                "eval_initial": job.reward_eval_initial,
            },
            "learner": {
                **job.spec["learner"],
                "state": job.learner_state,
                "t_train": job.t_train,
                "t_bcast": job.t_bcast,
                "uplink_mbps": learner_link(job, self.core.settings.learner_uplink_mbps).mbps,
                "uplink_mbps_measured": job.uplink_measured,
                "bubble_ratio": bubble_ratio(job.idle_seconds, job.train_seconds),
                "dropped_ratio": dropped_ratio(job),
                "dropped": await dropped_counts(session, job.id),
            },
            "capacity": self._capacity(job),
            "cost": self._cost_summary(job, found),
            "final_prefix": job.final_prefix,
        }

    @staticmethod
    def _capacity(job: Job) -> dict[str, Any]:
        keys = ("mu_min", "mu_target", "mu_steered", "mu_knee", "mu_pool", "feasible", "explanation", "steering")
        return {key: job.capacity.get(key) for key in keys}

    def _cost_summary(self, job: Job, found: Books) -> dict[str, Any]:
        kept = self.core.wind_down_s(found.leases)
        exposure = money.exposure(job, found.leases, self.core.clock(), kept, before=found.before)
        projected = _projected(job, exposure.spent)
        return {
            "budget_usd": usd(job.budget_micros),
            "spent_usd": usd(exposure.spent),
            "committed_usd": usd(exposure.committed),
            "usd_per_step": usd(round(exposure.spent / job.step)) if job.step else None,
            "projected_usd": usd(projected) if projected is not None else None,
        }

    async def cost(self, session: AsyncSession, jobs: Sequence[Job]) -> dict[str, Any]:
        """Money of one job, or of many."""
        return await self.costs.view(session, jobs)

    async def fleet(self, session: AsyncSession, jobs: Sequence[Job]) -> dict[str, Any]:
        """Capacity and nodes of one job, or of many: every open lease, its node if it has joined."""
        ids, now = [j.id for j in jobs], self.core.clock()
        pairs = (
            await session.execute(
                select(Lease, Node)
                .outerjoin(Node, Node.lease_id == Lease.id)
                .where(Lease.job_id.in_(ids), Lease.state.in_([s for s in LeaseState if s.open]))
                .order_by(Lease.created_at)
            )
        ).tuples()
        rows = [self._node_row(lease, node, now) for lease, node in pairs]
        capacities = [self._capacity(j) for j in jobs]
        if len(jobs) == 1:
            return {
                "job_id": jobs[0].id,
                "capacity": capacities[0],
                "nodes": rows,
                **await self._broadcast(session, jobs[0]),
            }
        total = {
            key: sum(c[key] or 0.0 for c in capacities) for key in ("mu_min", "mu_target", "mu_steered", "mu_pool")
        }
        return {"capacity": {**total, "feasible": all(c["feasible"] is not False for c in capacities)}, "nodes": rows}

    async def _broadcast(self, session: AsyncSession, job: Job) -> dict[str, Any]:
        """Who carried how many bytes, and how long broadcasts took."""
        nodes = list(await session.scalars(select(Node).where(Node.job_id == job.id)))
        carried = {kind: sum(int(n.bytes_from.get(kind, 0)) for n in nodes) for kind in ("learner", "peer", "store")}
        times = (
            await session.execute(
                select(func.count(), func.avg(SnapshotRow.broadcast_s)).where(
                    SnapshotRow.job_id == job.id, SnapshotRow.completed_at.is_not(None), SnapshotRow.version > 0
                )
            )
        ).one()
        return {
            "broadcast": {
                "bytes_from_learner": carried["learner"],
                "bytes_from_peers": carried["peer"],
                "bytes_from_store": carried["store"],
                "chain_depth_max": job.chain_depth_max,
                "completed": times[0],
                "t_bcast_mean": times[1],
                "quantise": job.spec.get("snapshot", {}).get("quantise"),
                **await publishes(session, job.id, nodes),
            },
            "totals": {
                "nodes_peak": job.nodes_peak,
                "preemptions": job.preemptions,
                "price_events": job.price_events,
                "rollouts_accepted": job.rollouts_accepted,
                "rollouts_trained": job.rollouts_trained,
                "rollouts_dropped": job.rollouts_dropped,
                "tokens_generated": sum(n.tokens_generated for n in nodes),
                "tokens_wasted": _total([job.tokens_wasted, *(n.tokens_wasted for n in nodes)]),
            },
        }

    @staticmethod
    def _node_row(lease: Lease, node: Node | None, now: float) -> dict[str, Any]:
        mu = (node.mu_measured if node else None) or lease.mu_prior
        waiting = LeaseState(lease.state) is not LeaseState.ACTIVE or node is None
        return {
            "id": node.id if node else None,
            "job_id": lease.job_id,
            "lease_id": lease.id,
            "provider": lease.provider,
            "offer_id": lease.offer_id,
            "machine_id": lease.machine_id,
            "gpu_name": lease.gpu_name,
            "num_gpus": lease.num_gpus,
            "state": lease.state if waiting or node is None else node.state,
            "reason": lease.reason if waiting or node is None else node.reason or NODE_WAITS.get(node.state, ""),
            "since": moment(lease.state_since if waiting or node is None else node.state_since),
            "billing": lease.billing,
            "price_per_hour": usd(lease.rate_micros_h),
            "effective_price_per_hour": usd(lease.effective_micros_h),
            "rho": pricing.rho(lease.effective_micros_h, mu) if mu else None,
            "mu_prior": lease.mu_prior,
            "mu_measured": node.mu_measured if node else None,
            "policy_version": node.policy_version if node else None,
            **_start(lease, now),
            **_links(lease, node),
            "chain": node.chain if node else None,
            "chain_position": node.chain_position if node else None,
            "upstream": (node.upstream or None) if node else None,
            "heartbeat_age": round(now - node.heartbeat_at, 3) if node else None,
            "rollouts_accepted": node.rollouts_accepted if node else 0,
            "audits": node.audits if node else 0,
            "audit_failures": node.audit_failures if node else 0,
            "drift": node.audit_rms if node else None,
            "mismatch_kl": node.audit_kl if node else None,
            "twins": node.twins if node else 0,
            "twin_doubt": node.twin_doubt if node else 0.0,
            "tokens_generated": node.tokens_generated if node else 0,
            "tokens_wasted": node.tokens_wasted if node else {},
            "errors": node.errors if node else {},
            "started_at": moment(lease.gpu_since),
        }

    @staticmethod
    def step(row: Step) -> dict[str, Any]:
        """One learner step."""
        return {
            "step": row.step,
            "at": moment(row.at),
            "reward": row.reward,
            "t_train": row.t_train,
            "t_idle": row.t_idle,
            "rollouts": row.rollouts,
            "dropped": row.dropped,
            "lags": row.lags,
            "nodes": row.nodes,
            "mu_pool": row.mu_pool,
            "spent_usd": usd(row.spent_micros),
            "metrics": row.metrics,
        }

    @staticmethod
    def entry(row: LedgerEntry) -> dict[str, Any]:
        """One entry of the ledger."""
        return {
            "id": row.id,
            "job_id": row.job_id,
            "lease_id": row.lease_id,
            "provider": row.provider,
            "kind": row.kind,
            "from": moment(row.start),
            "to": moment(row.end),
            "usd": usd(row.micros),
        }

    @staticmethod
    def event(row: Event) -> dict[str, Any]:
        """One event."""
        return {
            "id": row.id,
            "job_id": row.job_id,
            "at": moment(row.at),
            "kind": row.kind,
            "message": row.message,
            "data": row.data,
        }
