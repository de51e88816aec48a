"""What a job says about learning: the objective, the passes, the evaluations, the checkpoints.

Invariant: parameters of an objective that isn't chosen have no effect, and bounds that belong together are in order.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from app.protocol.base import Spec

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


class BorrowSpec(Spec):
    """Groups that another job was trained on come to each batch, on top of its own (docs/learner.md)."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    """A job of the same task that ended well and had `learner.lend`."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Of `batch.prompts`: how many groups at most."""


class LearnerSpec(Spec):
    """Learning plane: where it runs and how it optimises. Parameters of a loss that isn't chosen have no effect."""

    placement: Literal["local", "attached"] = "local"
    """`local`: the control service starts it on its own machine. `attached`: somebody starts it elsewhere, with a
    learner token, and it dials out."""
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
    one_sided: bool = False
    """Rollouts of quantised weights count at most once: no importance weight of theirs is above 1."""
    lend: bool = False
    """Put the groups that each step is made from into the object store, for jobs that borrow them."""
    borrow: BorrowSpec | None = None
    """Experimental: mix in groups of another model, one-sided."""
    grad_cosine: bool = False
    """Report the cosine with the previous step's gradient, at the price of one more copy of the weights in memory. An
    adaptive S goes by it, so that it is measured then in any case."""
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
    probe: bool | None = None
    """Versions carry log-probs of some tokens, by which engines show that they have loaded them. It costs a copy of the
    model in the learner's host memory; null: up to two billion parameters."""
    tensorboard: bool = False
    """Write TensorBoard files beside metrics.jsonl."""
    wandb: bool = False
    """Write an offline run of Weights & Biases beside metrics.jsonl; `wandb sync` uploads it."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        pairs = (("bapo_low", "bapo_low_max"), ("bapo_high", "bapo_high_max"), ("obrs_lambda", "obrs_cap"))
        for low, high in pairs:
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} must be at most {high}; give both")
        if self.final_merged and self.lora is None:
            raise ValueError("final_merged needs lora: without an adapter the final model is whole anyway")
        if self.bapo_dual_clip < self.bapo_high_max:
            raise ValueError("bapo_dual_clip must be at least bapo_high_max")
        if self.one_sided and self.loss == "obrs":
            raise ValueError("one_sided is not defined for obrs, which rejects tokens in place of weighing them down")
        if self.borrow is not None and self.loss in ("obrs", "decoupled"):
            raise ValueError(f"borrow is not defined for {self.loss}: groups of another model have no version, no age")
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
