"""Prometheus metrics of the control service (prefix `echo2_`).

Invariant: names and labels are those that docs/operations.md lists; gauges are set from the database at each tick.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BY_NODE = "mismatch_kl_node_"
"""What comes before a node's name in the learner's numbers."""


class Metrics:
    """One registry a process, so that tests do not share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._capacity(["job"], self.registry)
        self._rollouts(["job"], self.registry)
        self._times(["job"], self.registry)
        self._market(self.registry)

    def _capacity(self, job: list[str], registry: CollectorRegistry) -> None:
        self.mu_pool = Gauge("echo2_mu_pool", "Rollouts per second of the pool", job, registry=registry)
        self.mu_target = Gauge("echo2_mu_target", "Capacity target, rollouts per second", job, registry=registry)
        self.mu_steered = Gauge(
            "echo2_mu_steered", "What the pool is held at after steering, rollouts per second", job, registry=registry
        )
        self.mu_min = Gauge("echo2_mu_min", "Minimum capacity (Eq. 2), rollouts per second", job, registry=registry)
        self.bubble_ratio = Gauge(
            "echo2_bubble_ratio", "Share of the time that the learner waits", job, registry=registry
        )
        self.reward = Gauge("echo2_reward", "Mean reward", ["job", "split"], registry=registry)
        self.learner = Gauge(
            "echo2_learner", "What the learner told of its newest step", ["job", "name"], registry=registry
        )
        self.node_mismatch = Gauge(
            "echo2_node_mismatch_kl", "Mismatch KL of a node's tokens in the newest step", ["job", "node"],
            registry=registry,
        )  # fmt: skip
        self._told: dict[tuple[Gauge, str], set[str]] = {}

    def _rollouts(self, job: list[str], registry: CollectorRegistry) -> None:
        self.dropped = Counter(
            "echo2_dropped_rollouts_total", "Rollouts never trained on", ["job", "reason"], registry=registry
        )
        self.accepted = Counter("echo2_accepted_rollouts_total", "Rollouts accepted", job, registry=registry)
        self.refused = Counter(
            "echo2_refused_files_total", "Trajectory files refused", ["job", "reason"], registry=registry
        )
        self.tokens_generated = Counter(
            "echo2_tokens_generated_total", "Completion tokens that nodes sampled", job, registry=registry
        )
        self.tokens_wasted = Counter(
            "echo2_tokens_wasted_total", "Sampled tokens of no use", ["job", "reason"], registry=registry
        )
        self.audits = Counter(
            "echo2_audits_total", "Groups that the learner computed again", ["job", "verdict"], registry=registry
        )
        self.quarantined = Counter(
            "echo2_quarantined_nodes_total", "Nodes that audits convicted", job, registry=registry
        )
        self.staleness = Histogram(
            "echo2_staleness",
            "Version lag of trained rollouts",
            job,
            registry=registry,
            buckets=(0, 1, 2, 3, 4, 6, 8, 11, 16, 32),
        )
        self.dropped_age = Histogram(
            "echo2_dropped_age",
            "Version lag of rollouts when they were dropped",
            ["job", "reason"],
            registry=registry,
            buckets=(0, 1, 2, 3, 4, 6, 8, 11, 16, 32),
        )

    def _times(self, job: list[str], registry: CollectorRegistry) -> None:
        self.broadcast = Histogram(
            "echo2_broadcast_seconds",
            "From publish until the last node that was at work then has it",
            job,
            registry=registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
        )
        self.train = Histogram(
            "echo2_train_seconds",
            "Active training per step",
            job,
            registry=registry,
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
        )
        self.idle = Histogram(
            "echo2_idle_seconds",
            "Waiting before each step but the first",
            job,
            registry=registry,
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
        )
        self.reconcile = Histogram("echo2_reconcile_seconds", "Time of one reconcile", registry=registry)

    def _market(self, registry: CollectorRegistry) -> None:
        self.spent = Counter("echo2_spent_usd_total", "Dollars in the ledger", ["kind"], registry=registry)
        self.leases = Gauge("echo2_leases", "Leases by state", ["provider", "state"], registry=registry)
        self.nodes = Gauge("echo2_nodes", "Nodes by state", ["state"], registry=registry)
        self.requests = Counter(
            "echo2_provider_requests_total", "Calls to providers", ["provider", "call", "outcome"], registry=registry
        )

    def learner_step(self, job: str, numbers: Mapping[str, float]) -> None:
        """The numbers of a job's newest step, those of single nodes apart; what this step doesn't have is taken out."""
        self._newest(self.learner, job, {name: value for name, value in numbers.items() if "_node_" not in name})
        nodes = {name.removeprefix(_BY_NODE): value for name, value in numbers.items() if name.startswith(_BY_NODE)}
        self._newest(self.node_mismatch, job, nodes)

    def _newest(self, gauge: Gauge, job: str, told: Mapping[str, float]) -> None:
        for name in self._told.pop((gauge, job), set()) - told.keys():
            gauge.remove(job, name)
        for name, value in told.items():
            gauge.labels(job, name).set(value)
        if told:
            self._told[gauge, job] = set(told)

    def provider_request(self, provider: str, call: str, outcome: str) -> None:
        """Count one request of an adapter."""
        self.requests.labels(provider, call, outcome).inc()

    def render(self) -> bytes:
        """Text exposition."""
        return generate_latest(self.registry)
