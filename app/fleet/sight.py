"""What a tick looks at, turned into the values that decisions are made of. Pure.

Invariant: nothing here asks or changes anything; the same rows give the same candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.fleet import activation, estimates, pricing
from app.fleet.market import JobView, Priced
from app.protocol.job import JobSpec
from app.protocol.node import NodeState
from app.storage.models import Job, Lease, LeaseState, Node
from providers.base import Billing

STARTUP_S = 60.0
SETTLE_S = 20.0
"""A node's own measurement counts fully once it has worked this long."""
RISK = 0.25
"""A machine that its provider may soon take is worth so much less than another: its successor starts up unpaid for."""
LEAVING = (NodeState.DRAINING, NodeState.LOST, NodeState.GONE)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a tick looks at."""

    job: Job
    spec: JobSpec
    leases: Sequence[Lease]
    nodes: dict[str, Node]
    """By lease."""

    @property
    def usable(self) -> list[Lease]:
        """Leases that work or will, those on their way out not counted."""
        return [
            x
            for x in self.leases
            if LeaseState(x.state).usable
            and not x.release_wanted
            and not (
                x.id in self.nodes and self.nodes[x.id].state in (NodeState.DRAINING, NodeState.LOST, NodeState.GONE)
            )
        ]


def trust(view: JobView, target: float, first_nodes: int) -> float:
    """The most that one machine may count for.

    A roofline can be wrong by a factor of ten. With nothing measured yet, several machines are asked to deliver what
    one promises: a dud, or an interruption, then costs a part of the pool and not all of it.
    """
    return float("inf") if view.measured else target / first_nodes


def key(priced: Priced) -> str:
    """Names an offer among those of all providers."""
    return f"{priced.offer.provider}:{priced.offer.offer_id}"


def candidate(priced: Priced, most: float) -> activation.Candidate:
    """An offer as the decision sees it; it counts for at most `most`."""
    machine = f"{priced.offer.provider}:{priced.offer.machine_id}"
    return activation.Candidate(key(priced), machine, priced.price.total, min(priced.mu, most), priced.usual)


def running(lease: Lease, seen: Seen, view: JobView, now: float, most: float) -> activation.Running:
    """A lease as the decision sees it: measured throughput where there is one, the price of keeping it."""
    node = seen.nodes.get(lease.id)
    active = node is not None and node.state == NodeState.ACTIVE
    base = estimates.prior(lease.gpu_name, lease.num_gpus, view.load)
    raw = estimates.estimate(base, lease.gpu_name, view.measured).mu
    if node is not None and active and node.mu_measured:
        raw = estimates.settle(node.mu_measured, raw, now - node.state_since, SETTLE_S)
    mu = min(most, pricing.effective_throughput(raw, lease.reliability, seen.spec.fleet.interruptible))
    outbid = lease.billing == Billing.SPOT_BID and lease.market_micros_h > lease.rate_micros_h
    price = lease.effective_micros_h
    if outbid:
        price += pricing.bid_for(lease.market_micros_h, None) - lease.rate_micros_h
    warned = lease.endangered_since is not None
    if warned:
        price = round(price * (1 + RISK))
    one = activation.Candidate(lease.id, f"{lease.provider}:{lease.machine_id}", price, mu)
    return activation.Running(one, active, now - lease.created_at, outbid or warned)


def job_view(seen: Seen) -> JobView:
    """What ranking needs to know of the job: its workload, its traffic, what was measured."""
    job, spec = seen.job, seen.spec
    tokens = min(spec.sampling.max_tokens, 512)
    load = estimates.Workload(parameters=job.parameters or 1_000_000, tokens_per_rollout=float(tokens))
    period_s = max(1.0, (job.t_train or 10.0) * job.publish_period)
    snapshots = (job.snapshot_bytes or 0) * 3600 / period_s
    rollout_bytes = 3600 / max(0.1, job.t_train or 10.0) * spec.rollouts_per_step * tokens * 12 / max(1, job.max_nodes)
    measured = []
    for lease in seen.leases:
        node = seen.nodes.get(lease.id)
        if node is not None and node.mu_measured:
            base = estimates.prior(lease.gpu_name, lease.num_gpus, load).mu
            measured.append(estimates.Measurement(lease.gpu_name, node.mu_measured, base))
    return JobView(spec, load, pricing.Traffic(snapshots, snapshots + rollout_bytes), tuple(measured), STARTUP_S)
