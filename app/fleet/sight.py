"""What a tick looks at, turned into the values that decisions are made of. Pure.

Invariant: nothing here asks or changes anything; the same rows give the same candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.fleet import activation, bids, estimates, pricing
from app.fleet.priced import JobView
from app.fleet.ranking import lead_s
from app.protocol.base import usd
from app.protocol.job import JobSpec
from app.protocol.node import NodeState
from app.storage.models import Job, Lease, LeaseState, Node
from providers.base import Billing

MODEL_BYTES = 2
"""Of each parameter of the model's files: bf16."""
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
    before: int = 0
    """What the job's leases cost that are over and not among these, micro-dollars."""

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


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the market says of a machine that we hold."""

    usual_floor: float | None = None
    """What the floor of its bid usually is."""
    known: bool = False
    """That rests on as long a look as it averages over."""
    on_demand: int | None = None
    """Its rent on demand."""


def keeping(lease: Lease, caps: bids.Caps) -> int | None:
    """The rent that has to be matched for a lease to stay: the floor that its bid must follow, or the price that its
    host has announced. None if nothing more than now is asked for."""
    if lease.billing == Billing.SPOT_BID:
        return lease.market_micros_h if bids.presses(lease.market_micros_h, lease.rate_micros_h, caps) else None
    return lease.announced_micros_h


def ending(lease: Lease, view: JobView, now: float) -> str:
    """Why a lease will be over soon, whatever is paid for it; empty if it will not."""
    left = None if lease.host_ends_at is None else lease.host_ends_at - now
    if left is not None and left < lead_s(view.start_s(lease.provider, lease.down_mbps)):
        return f"its host ends the contract in {max(0.0, left):.0f} s"
    if view.cap is not None and lease.rate_micros_h > view.cap:
        return f"its price rose above max_price_per_hour {view.spec.fleet.max_price_per_hour}"
    return ""


def rest(lease: Lease, *, active: bool) -> int:
    """All parts of a lease's price but the rent. What its start cost is spent once it works, and no reason to keep it
    or to leave it."""
    return lease.effective_micros_h - lease.rate_micros_h - (lease.start_micros_h if active else 0)


def running(
    lease: Lease, seen: Seen, view: JobView, now: float, most: float, outlook: Outlook = Outlook()
) -> activation.Running:
    """A lease as the decision sees it: measured throughput where there is one, the price of keeping it."""
    node = seen.nodes.get(lease.id)
    active = node is not None and node.state == NodeState.ACTIVE
    base = estimates.prior(lease.gpu_name, lease.num_gpus, view.load)
    raw = estimates.estimate(base, lease.gpu_name, view.measured).mu
    if node is not None and active and node.mu_measured:
        raw = estimates.settle(node.mu_measured, raw, now - node.state_since, SETTLE_S)
    life_h = view.life_h(lease.provider, lease.gpu_name, lease.machine_id)
    start_s = view.start_s(lease.provider, lease.down_mbps)
    mu = min(most, raw * pricing.availability(lease.reliability, life_h, start_s))
    other = rest(lease, active=active)
    bidding = lease.billing == Billing.SPOT_BID
    caps = bids.Caps(view.cap, outlook.on_demand if bidding else None)
    why, asked = ending(lease, view, now), keeping(lease, caps)
    least = compute = lease.rate_micros_h
    if asked is not None:
        full = bids.bid(asked, caps) if bidding else asked if asked <= (view.cap or asked) else None
        if full is None:
            why = why or f"keeping it would cost ${usd(asked)}/h, above max_price_per_hour or its on-demand price"
        else:
            least, compute = asked, full
    price = other + compute
    warned = lease.endangered_since is not None and not why
    if warned:
        price = round(price * (1 + RISK))
    usual = None
    if bidding and outlook.usual_floor is not None:
        usual = other + round(outlook.usual_floor * bids.MARGIN)
    one = activation.Candidate(lease.id, f"{lease.provider}:{lease.machine_id}", price, mu, usual)
    outbid = asked is not None and not why
    return activation.Running(one, active, now - lease.created_at, warned, outbid, other + least, outlook.known, why)


def job_view(seen: Seen, benched: Mapping[str, float]) -> JobView:
    """What ranking needs to know of the job: its workload, its traffic, what was measured. `benched`: by hand."""
    job, spec = seen.job, seen.spec
    tokens = min(spec.sampling.max_tokens, 512)
    load = estimates.Workload(job.parameters or 1_000_000, float(tokens), benched=benched)
    period_s = max(1.0, (job.t_train or 10.0) * job.publish_period)
    snapshots = (job.publish_bytes or job.snapshot_bytes or 0) * 3600 / period_s
    rollout_bytes = 3600 / max(0.1, job.t_train or 10.0) * spec.rollouts_per_step * tokens * 12 / max(1, job.max_nodes)
    measured = []
    for lease in seen.leases:
        node = seen.nodes.get(lease.id)
        if node is not None and node.mu_measured:
            base = estimates.prior(lease.gpu_name, lease.num_gpus, load).mu
            measured.append(estimates.Measurement(lease.gpu_name, node.mu_measured, base))
    traffic = pricing.Traffic(snapshots, snapshots + rollout_bytes)
    return JobView(spec, load, traffic, tuple(measured), model_bytes=MODEL_BYTES * load.parameters)
