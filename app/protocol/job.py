"""A job as a user posts it.

Invariant: a JobSpec that validates is one that could run; what only running can tell (does the model load, does the
task know its parameters) fails the job before any node is rented.
"""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from app.protocol.base import Printable, Spec, micros, usd
from app.protocol.learner_spec import LearnerSpec
from app.protocol.pruning import Prune
from app.protocol.task_spec import TaskSpec
from app.protocol.trust_spec import TrustSpec

GroupPolicy = Literal["uniform", "coba", "cures"]


class JobStatus(StrEnum):
    """Life of a job. The last four are final."""

    PENDING = "pending"
    """The learner starts: it loads the model and the task and publishes v0. Nothing is rented."""
    PROVISIONING = "provisioning"
    """Nodes are being rented; no step has been trained yet."""
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    """Checkpoint, then give every node back."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    BUDGET_EXHAUSTED = "budget_exhausted"

    @property
    def final(self) -> bool:
        """Whether the job is over."""
        return self in FINAL_STATUSES


FINAL_STATUSES = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.BUDGET_EXHAUSTED})


class StopSpec(Spec):
    """When to stop; whichever comes first."""

    steps: int | None = Field(default=100, ge=1, le=1_000_000_000)
    target_reward: float | None = None
    """Held-out reward at which the job is done."""
    max_hours: float | None = Field(default=None, gt=0, le=1_000_000)

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if self.steps is None and self.target_reward is None and self.max_hours is None:
            raise ValueError("give at least one of steps, target_reward, max_hours")
        return self


MOST_ROLLOUTS = 1_000_000
"""Of a step: the learner holds them all at once."""


class BatchSpec(Spec):
    """One learner step consumes `prompts` × `group_size` rollouts."""

    prompts: int = Field(default=32, ge=1, le=100_000)
    group_size: int = Field(default=8, ge=2, le=1024)
    group_deadline_s: float | None = Field(default=None, gt=0, le=86_400)
    """Seconds after which a group is late; default: what its node should need, ten times."""
    on_late: Literal["reissue", "train"] = "reissue"
    """What is done about late groups: another node gets the work, or the learner trains on those that came."""
    group_policy: GroupPolicy = "uniform"
    """How many completions each prompt gets: all the same, or more where they teach more; over a window of `prompts`
    groups the sum is the same. `coba` and `cures` are experimental; docs/capacity.md."""
    min_group: int | None = Field(default=None, ge=2, le=1024)
    """coba, cures: fewest completions of a prompt; default 2."""
    max_group: int | None = Field(default=None, ge=2, le=1024)
    """coba, cures: most completions of a prompt; default 4 × `group_size`."""
    prune: Prune | None = None
    """Nodes send only the most informative pairs of a group: half of it."""

    @model_validator(mode="after")
    def _late_is_defined(self) -> Self:
        if self.on_late == "train" and self.group_deadline_s is None:
            raise ValueError('on_late "train" needs group_deadline_s: how long the learner waits for a whole batch')
        return self

    @model_validator(mode="after")
    def _fits_a_learner(self) -> Self:
        count = self.prompts * self.group_size
        if count > MOST_ROLLOUTS:
            raise ValueError(f"prompts × group_size is {count}, more than {MOST_ROLLOUTS} rollouts a step")
        return self

    @model_validator(mode="after")
    def _sizes_are_defined(self) -> Self:
        if self.group_policy == "uniform" and (self.min_group is not None or self.max_group is not None):
            raise ValueError('min_group and max_group need a group_policy that varies sizes: "coba" or "cures"')
        if self.group_policy != "uniform" and self.prune is not None:
            raise ValueError("prune leaves out the rewards that group_policy decides by: give one of them")
        low, high = self.group_bounds
        if not low <= self.group_size <= high:
            raise ValueError(f"group_size {self.group_size} must lie within min_group {low} and max_group {high}")
        return self

    @property
    def group_bounds(self) -> tuple[int, int]:
        """Fewest and most completions of a prompt."""
        if self.group_policy == "uniform":
            return self.group_size, self.group_size
        return self.min_group or 2, self.max_group or min(1024, 4 * self.group_size)


class SamplingSpec(Spec):
    """How nodes sample. Log-probs are those of the distribution sampled from."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    top_p: float = 1.0
    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)

    @field_validator("top_p")
    @classmethod
    def _unbiased(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("must be 1.0: a truncated distribution biases the importance ratio")
        return value


ADAPTIVE_START = 3
"""S with which an adaptive job begins, the paper's default."""


class StalenessSpec(Spec):
    """`staleness`, instead of `staleness_budget`: how far S may go, and whether it follows what the learner sees."""

    max: int = Field(ge=1, le=1000)
    """S is never greater. An adaptive one begins at min(3, max)."""
    adaptive: bool = False
    """Lower S, and κ with it, as soon as a step shows that policies are too far apart; raise them slowly."""
    min_ess: float = Field(default=0.5, gt=0, lt=1)
    """adaptive: an effective sample size below this lowers S."""
    max_mismatch_kl: float = Field(default=0.02, gt=0)
    """adaptive: a mean KL between sampler and policy above this lowers S."""


def checked_dollars(value: Decimal) -> Decimal:
    """An amount of dollars. Raises ValueError for one that is not positive, or more than anybody has."""
    if not value.is_finite():
        raise ValueError("must be a finite amount of dollars")
    if value > 10_000_000:
        raise ValueError("must be at most 10000000 dollars")
    if micros(value) <= 0:
        raise ValueError("must be more than 0 dollars")
    return value


class FleetSpec(Spec):
    """What may be rented."""

    providers: list[str] = Field(default_factory=list)
    """Empty: every provider that the service has."""
    gpu_names: list[str] = Field(default_factory=list)
    max_price_per_hour: Decimal | None = Field(default=None, gt=0)
    min_reliability: float = Field(default=0.9, ge=0, le=1)
    interruptible: bool = True
    max_nodes: int = Field(default=8, ge=1, le=10_000)
    disk_gb: float = Field(default=16.0, ge=8, le=1_000_000)
    transport: Literal["auto", "chain", "star", "store"] | None = None
    """How snapshots travel to the nodes; null: as the service's `broadcast_transport` says."""

    @field_validator("max_price_per_hour")
    @classmethod
    def _possible(cls, value: Decimal | None) -> Decimal | None:
        return value if value is None else checked_dollars(value)

    @field_serializer("max_price_per_hour", when_used="json-unless-none")
    def _six_places(self, value: Decimal) -> str:
        return usd(micros(value))


def period(staleness: int, fixed: int | None) -> int:
    """κ for an S: max(1, S − 1), the paper's default, or what the owner fixed where that is less."""
    longest = max(1, staleness - 1)
    return longest if fixed is None else min(fixed, longest)


class SnapshotSpec(Spec):
    """How versions travel; docs/broadcast.md."""

    deltas: bool = True
    """Publish beside a version the delta that leads to it from the one before, where that pays."""
    keyframe_every: int = Field(default=16, ge=1, le=1000)
    """One version of so many is put into the object store whole; of the others their deltas are, where they pay."""
    quantise: Literal["int8"] | None = None
    """Send large matrices in eight bits. Nodes then sample from the quantised policy, and say so; the learner's own
    weights, checkpoints and final model are not quantised."""


class JobSpec(Spec):
    """`POST /v1/jobs`. Only `model`, `task` and `budget_usd` are required."""

    name: Printable = Field(default="", max_length=200)
    model: str = Field(min_length=1, max_length=500)
    """`tiny`, `small`, a Hugging Face id (`org/name`) or a local folder with a config.json."""
    task: TaskSpec
    budget_usd: Decimal
    stop: StopSpec = StopSpec()
    staleness_budget: int = Field(default=3, ge=1, le=1000)
    """S: a rollout sampled under v_x may be trained on at step t only if t − x ≤ S."""
    staleness: StalenessSpec | None = None
    """In place of `staleness_budget`, which then is its `max`."""
    publish_period: int | None = Field(default=None, ge=1)
    """κ; default max(1, S − 1)."""
    safety_factor: float = Field(default=1.1, ge=1, le=10)
    """γ."""
    batch: BatchSpec = BatchSpec()
    sampling: SamplingSpec = SamplingSpec()
    learner: LearnerSpec = LearnerSpec()
    fleet: FleetSpec = FleetSpec()
    snapshot: SnapshotSpec = SnapshotSpec()
    trust: TrustSpec = TrustSpec()
    rewards: Literal["node", "learner", "both"] = "node"
    """Where answers are scored. `learner`: nodes hand in 0, and what the learner computes counts. `both`: the node's
    reward counts, the learner computes it again, and a difference is a lie."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    notify_url: str | None = Field(default=None, max_length=2000)

    @model_validator(mode="before")
    @classmethod
    def _staleness_is_the_budget(cls, data: object) -> object:
        if not isinstance(data, dict) or "staleness_budget" in data:
            return data
        staleness = data.get("staleness")
        bound = staleness.get("max") if isinstance(staleness, dict) else getattr(staleness, "max", None)
        return data if bound is None else {**data, "staleness_budget": bound}

    @field_validator("staleness")
    @classmethod
    def _one_staleness(cls, value: StalenessSpec | None, info: ValidationInfo) -> StalenessSpec | None:
        budget = info.data.get("staleness_budget")
        if value is not None and budget is not None and value.max != budget:
            raise ValueError(f"max {value.max} differs from staleness_budget {budget}; give one of them")
        return value

    @model_validator(mode="after")
    def _quantised_fits(self) -> Self:
        if self.snapshot.quantise and self.learner.lora:
            raise ValueError("snapshot.quantise is for whole models; an adapter (learner.lora) is small: leave it out")
        if self.learner.one_sided and not self.snapshot.quantise:
            raise ValueError("learner.one_sided is for rollouts of quantised weights: it needs snapshot.quantise")
        return self

    @model_validator(mode="after")
    def _nodes_know_rewards(self) -> Self:
        if self.rewards == "learner" and (self.batch.prune or self.batch.group_policy != "uniform"):
            raise ValueError(
                'batch.prune and batch.group_policy go by the rewards that nodes compute: rewards must not be "learner"'
            )
        if self.rewards == "learner" and self.learner.eval_by == "fleet":
            raise ValueError('nodes don\'t score: rewards "learner" needs learner.eval_by "learner"')
        return self

    @field_validator("budget_usd")
    @classmethod
    def _positive(cls, value: Decimal) -> Decimal:
        return checked_dollars(value)

    @field_validator("publish_period")
    @classmethod
    def _publish_period_fits(cls, value: int | None, info: ValidationInfo) -> int | None:
        staleness = info.data.get("staleness_budget")
        if value is not None and staleness is not None and value > max(1, staleness - 1):
            raise ValueError(f"must be at most max(1, staleness_budget - 1) = {max(1, staleness - 1)}")
        return value

    @property
    def kappa(self) -> int:
        """κ, the publish period in learner steps (paper §3: default S − 1)."""
        return period(self.staleness_budget, self.publish_period)

    @property
    def first_staleness(self) -> int:
        """S at the beginning: an adaptive one starts low, because a policy moves fastest at first, and rises."""
        return min(ADAPTIVE_START, self.staleness_budget) if self.adaptive else self.staleness_budget

    @property
    def first_period(self) -> int:
        """κ at the beginning."""
        return period(self.first_staleness, self.publish_period)

    @property
    def adaptive(self) -> bool:
        """Whether S follows what the learner sees."""
        return self.staleness is not None and self.staleness.adaptive

    @property
    def rollouts_per_step(self) -> int:
        """R."""
        return self.batch.prompts * self.batch.group_size

    @property
    def budget_micros(self) -> int:
        """The budget in micro-dollars."""
        return micros(self.budget_usd)
