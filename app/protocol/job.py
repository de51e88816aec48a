"""A job as a user posts it.

Invariant: a JobSpec that validates is one that could run; what only running can tell (does the model load, does the
task know its parameters) fails the job before any node is rented.
"""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from typing import Literal, Self

from pydantic import ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from app.protocol.base import Strict, micros


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


class Spec(Strict):
    """A part of what users write: no number in it is infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


class TaskSpec(Spec):
    """Which data plane plug-in, with what parameters."""

    name: str = Field(min_length=1, max_length=200)
    params: dict[str, JsonValue] = Field(default_factory=dict)


class StopSpec(Spec):
    """When to stop; whichever comes first."""

    steps: int | None = Field(default=100, ge=1)
    target_reward: float | None = None
    """Held-out reward at which the job is done."""
    max_hours: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if self.steps is None and self.target_reward is None and self.max_hours is None:
            raise ValueError("give at least one of steps, target_reward, max_hours")
        return self


class BatchSpec(Spec):
    """One learner step consumes `prompts` × `group_size` rollouts."""

    prompts: int = Field(default=32, ge=1, le=100_000)
    group_size: int = Field(default=8, ge=2, le=1024)
    group_deadline_s: float | None = Field(default=None, gt=0, le=86_400)
    """Seconds after which a group is late; default: what its node should need, ten times."""
    on_late: Literal["reissue", "train"] = "reissue"
    """What is done about late groups: another node gets the work, or the learner trains on those that came."""

    @model_validator(mode="after")
    def _late_is_defined(self) -> Self:
        if self.on_late == "train" and self.group_deadline_s is None:
            raise ValueError('on_late "train" needs group_deadline_s: how long the learner waits for a whole batch')
        return self


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


LossName = Literal[
    "ppo_clip", "dppo", "tis", "icepop", "decoupled", "m2po", "m2po_clip", "bapo", "cispo", "gspo", "obrs"
]
RewardScale = Literal["group", "none", "batch"]


class LoraSpec(Spec):
    """A low-rank adapter, W + (alpha / rank)·B·A (LoRA, arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: int = Field(default=32, ge=1)
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the linear layers that get one, such as `q_proj`; `all-linear`: all but the output layer."""

    @field_validator("targets")
    @classmethod
    def _some(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError('must be "all-linear" or name at least one kind of layer')
        return value


class LearnerSpec(Spec):
    """Learning plane: where it runs and how it optimises. Parameters of a loss that isn't chosen have no effect."""

    placement: Literal["local", "attached"] = "local"
    """`local`: the control service starts it on its own machine. `attached`: somebody starts it elsewhere, with a learner
    token, and it dials out."""
    learning_rate: float = Field(default=1e-6, gt=0, lt=1)
    warmup_steps: int = Field(default=5, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    loss: LossName = "dppo"
    """How a token's push is corrected for the policy that sampled it; docs/learner.md compares them."""
    scale_rewards: RewardScale | None = None
    """What r − mean(group) is divided by: the group's deviation, nothing, or the deviation of all rewards of the step.
    Default: `none` for dppo, else `group`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """ppo_clip, decoupled: the ratio counts down to 1 − clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """ppo_clip, decoupled: the ratio counts up to 1 + clip_high."""
    replay_ratio: Literal["off", "token", "sequence"] = "off"
    """ppo_clip: put the ratio against the sampler outside of the clip, truncated, as the paper's Eq. 24 does; of each
    token or of the whole answer."""
    replay_cap: float = Field(default=2.0, ge=1)
    """Largest replay ratio, if replay_ratio is on."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from v0, any loss. Above 0 it costs one more copy of the weights in memory, and a
    forward pass without gradient a step."""
    dppo_mask_low: float = Field(default=0.2, gt=0, le=1)
    """A token with a negative advantage is left out when its probability has fallen by more than this."""
    dppo_mask_high: float = Field(default=0.2, gt=0, le=1)
    """A token with a positive advantage is left out when its probability has risen by more than this."""
    dppo_pull: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio in dppo."""
    tis_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight of tis."""
    icepop_low: float = Field(default=0.5, ge=0, le=1)
    """icepop leaves out tokens with a smaller ratio."""
    icepop_high: float = Field(default=5.0, ge=1)
    """icepop leaves out tokens with a larger ratio."""
    decoupled_cap: float = Field(default=5.0, ge=1)
    """decoupled leaves out tokens for which π_proximal / π_behaviour is larger."""
    m2_budget: float = Field(default=0.04, gt=0)
    """m2po, m2po_clip: what the mean squared log-ratio may be."""
    bapo_target: float = Field(default=0.5, ge=0)
    """bapo widens its range until positive advantages weigh at least this many times what negative ones do."""
    bapo_low: float = Field(default=0.6, ge=0, le=1)
    """Where bapo's lower bound of the ratio starts."""
    bapo_low_max: float = Field(default=0.9, ge=0, le=1)
    """How far bapo's lower bound may rise."""
    bapo_high: float = Field(default=1.2, ge=1)
    """Where bapo's upper bound of the ratio starts."""
    bapo_high_max: float = Field(default=3.0, ge=1)
    """How far bapo's upper bound may rise."""
    bapo_step: float = Field(default=0.05, ge=0.001, le=1)
    """How far a bound of bapo moves at a time."""
    bapo_dual_clip: float = Field(default=3.0, gt=1)
    """bapo: a token with a negative advantage counts up to this ratio."""
    cispo_cap: float = Field(default=5.0, ge=1)
    """Largest importance weight of cispo."""
    gspo_low: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio of a whole answer counts down to 1 − gspo_low."""
    gspo_high: float = Field(default=4e-4, gt=0)
    """The ratio of a whole answer counts up to 1 + gspo_high."""
    obrs_lambda: float = Field(default=1.0, gt=0)
    """obrs (experimental) keeps a token with probability min(1, r / obrs_lambda)."""
    obrs_cap: float = Field(default=5.0, ge=1)
    """Largest weight of a token that obrs keeps."""
    grad_cosine: bool = False
    """Report the cosine with the previous step's gradient, at the price of one more copy of the weights in memory."""
    gac: bool = False
    """Experimental: take out of a gradient what only repeats the previous one. Costs that copy, too."""
    gac_low: float = Field(default=0.3, gt=0, lt=1)
    """gac: the cosine with the previous gradient that is left."""
    gac_high: float = Field(default=0.9, gt=0, le=1)
    """gac: above this cosine a step changes nothing."""
    refill: bool = True
    """Make up for groups without a signal with groups that are there beyond the next step's need."""
    refill_factor: float = Field(default=2.0, ge=1, le=10)
    """A step consumes at most so many times `batch.prompts` groups."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Padded tokens in one forward/backward pass of one GPU; with `packing` tokens without padding."""
    packing: bool = False
    """Answers stand in one row one after the other, without padding, and don't see each other."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of forward and backward passes. Weights and optimizer are float32 in any case."""
    activation_checkpointing: bool = False
    """Compute activations again for the gradient in place of holding them."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    lora: LoraSpec | None = None
    """Train an adapter, and leave the model as it is."""
    final_merged: bool = False
    """With `lora`: put the model with the adapter worked into it beside the adapter at the end."""
    eval_every: int = Field(default=20, ge=1)
    eval_prompts: int = Field(default=512, ge=1)
    eval_by: Literal["fleet", "learner"] = "fleet"
    """Who answers the held-out prompts between the first and the last step: nodes, beside their work, or the learner,
    which stops training for it. v0 and the last version are the learner's in any case: no node need be there then."""
    eval_samples: int = Field(default=1, ge=1, le=1024)
    """fleet: answers to each held-out prompt; pass@k is of so many."""
    eval_greedy: bool = True
    """fleet: ask for the most likely answer to each held-out prompt as well."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; default: at every publish, so that no published version can be lost."""
    checkpoint_keep: int = Field(default=2, ge=1, le=1000)
    """Newest checkpoints that stay, beside the best."""
    checkpoint_upload_every: int | None = Field(default=5, ge=1)
    """Every so many checkpoints one is put into the object store; null: only the last one of the job."""
    final: Literal["last", "best"] = "last"
    """Which weights the job ends with: those of the last step, or those with the best held-out reward."""
    tensorboard: bool = False
    """Write TensorBoard files beside metrics.jsonl."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        for low, high in (("bapo_low", "bapo_low_max"), ("bapo_high", "bapo_high_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} must be at most {high}; give both")
        if self.final_merged and self.lora is None:
            raise ValueError("final_merged needs lora: without an adapter the final model is whole anyway")
        if self.bapo_dual_clip < self.bapo_high_max:
            raise ValueError("bapo_dual_clip must be at least bapo_high_max")
        if self.gac_low > self.gac_high:
            raise ValueError("gac_low must be at most gac_high; give both")
        return self

    def most_groups(self, prompts: int) -> int:
        """How many groups a step of `prompts` may consume, with those that make up for groups without a signal."""
        return max(prompts, int(prompts * self.refill_factor)) if self.refill else prompts

    @property
    def reward_scale(self) -> RewardScale:
        """`scale_rewards` with its default filled in."""
        return self.scale_rewards or ("none" if self.loss == "dppo" else "group")


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
    max_mismatch_kl: float = Field(default=0.05, gt=0)
    """adaptive: a mean KL between sampler and policy above this lowers S."""


class FleetSpec(Spec):
    """What may be rented."""

    providers: list[str] = Field(default_factory=list)
    """Empty: every provider that the service has."""
    gpu_names: list[str] = Field(default_factory=list)
    max_price_per_hour: Decimal | None = Field(default=None, gt=0)
    min_reliability: float = Field(default=0.9, ge=0, le=1)
    interruptible: bool = True
    max_nodes: int = Field(default=8, ge=1, le=10_000)
    disk_gb: float = Field(default=16.0, ge=8)


def period(staleness: int, fixed: int | None) -> int:
    """κ for an S: max(1, S − 1), the paper's default, or what the owner fixed where that is less."""
    longest = max(1, staleness - 1)
    return longest if fixed is None else min(fixed, longest)


def _budget(value: Decimal) -> Decimal:
    if not value.is_finite():
        raise ValueError("must be a finite amount of dollars")
    if value > 10_000_000:
        raise ValueError("must be at most 10000000 dollars")
    if micros(value) <= 0:
        raise ValueError("must be more than 0 dollars")
    return value


class SnapshotSpec(Spec):
    """How versions travel; docs/broadcast.md."""

    deltas: bool = True
    """Publish beside a version the delta that leads to it from the one before, where that pays."""
    keyframe_every: int = Field(default=16, ge=1, le=1000)
    """One version of so many is put into the object store whole; of the others their deltas are, where they pay."""


class JobSpec(Spec):
    """`POST /v1/jobs`. Only `model`, `task` and `budget_usd` are required."""

    name: str = Field(default="", max_length=200)
    model: str = Field(min_length=1, max_length=500)
    """`tiny`, a Hugging Face id (`org/name`) or a local folder with a config.json."""
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

    @field_validator("budget_usd")
    @classmethod
    def _positive(cls, value: Decimal) -> Decimal:
        return _budget(value)

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


class JobPatch(Spec):
    """`PATCH /v1/jobs/{id}`: what may change while the job runs."""

    budget_usd: Decimal | None = None
    staleness_budget: int | None = Field(default=None, ge=1, le=1000)
    fleet: FleetPatch | None = None

    @field_validator("budget_usd")
    @classmethod
    def _positive(cls, value: Decimal | None) -> Decimal | None:
        return value if value is None else _budget(value)


class FleetPatch(Spec):
    """The part of the fleet that may change while the job runs."""

    max_nodes: int = Field(ge=1, le=10_000)


class SpotSelector(Spec):
    """Which offers a spot price is for: all given must match, `{}` matches the provider."""

    machine_id: int | str | None = None
    offer_id: int | str | None = None
    gpu_name: str | None = None
    instance_type: str | None = None
    region: str | None = None
    zone: str | None = None


JobPatch.model_rebuild()
