"""What the learner and the control service say to each other.

All paths are under `/v1/jobs/{job}/learner` with the job's learner token. `epoch` fences: each `start` gets a new one
and every later call must carry it in the header `Echo2-Epoch`; an older learner is answered 409 and must end.

| call | body → answer |
|---|---|
| `POST /start` | StartRequest → StartAnswer |
| `POST /ready` | Ready → ReadyAnswer: model and task load, v0 can be published; only then nodes are rented |
| `POST /heartbeat` | LearnerHeartbeat → LearnerDirectives |
| `GET /trajectories?after=&wait_s=` | → TrajectoryPage (long poll; oldest first) |
| `POST /published` | Published → LearnerDirectives |
| `POST /steps` | StepReport → LearnerDirectives; idempotent by step |
| `POST /drops` | Drops → LearnerDirectives: groups that will never be trained on, told without a step |
| `POST /evals` | EvalReport → LearnerDirectives |
| `POST /audits` | AuditReport → AuditAnswer (app/protocol/audits.py); idempotent by node and work item |
| `POST /done` | Done → 204 |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.protocol.base import Lenient, Strict
from app.protocol.hub import COMMIT, HubRef
from app.protocol.job import JobSpec


class StartRequest(Strict):
    """A learner process introduces itself."""

    pid: int
    host: str = Field(max_length=300)


class StartAnswer(Lenient):
    """The job, and where the learner stands in it."""

    job_id: str
    epoch: int
    spec: JobSpec
    relay_token: str
    last_step: int
    """Steps that the control service has on record."""
    published_version: int | None
    model_revision: str | None = None
    """The commit on the Hugging Face Hub that the job began with, whatever `main` is now; None: no such model, or the
    first start."""
    object_store_url: str = ""
    """Where the control service keeps objects, for a learner that was not told."""
    s3_endpoint_url: str | None = None


class AssetInfo(Strict):
    """A file of the model (config, tokenizer, the weights under an adapter) that was put into the store under
    `jobs/{job}/model/{path}`; one with `hub` is put there only when directives say `store_model`."""

    path: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    size: int
    blake3: str
    hub: HubRef | None = None
    """Where anybody gets the same bytes."""


class StalenessMove(Strict):
    """What the learner of a job with adaptive staleness wants from now on, and why."""

    staleness_budget: int = Field(ge=1)
    publish_period: int = Field(ge=1)
    reason: str = Field(max_length=300)


class Ready(Strict):
    """The learner can train: everything that only loading could show is known to be right."""

    resume_step: int = Field(ge=0)
    """The step of the checkpoint that it resumes from; 0 for a fresh start."""
    parameters: int = Field(ge=1)
    snapshot_bytes: int = Field(ge=1)
    train_prompts: int = Field(ge=1)
    eval_prompts: int = Field(ge=1)
    t_train_prior: float = Field(gt=0)
    """Seconds that a step of R rollouts took in a rehearsal with learning rate 0."""
    manifest_public_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    assets: list[AssetInfo]
    model_revision: str | None = Field(default=None, pattern=COMMIT)
    """The commit on the Hugging Face Hub that was loaded, if the model is from there."""
    staleness: StalenessMove | None = None
    """The S that held at `resume_step`, if it is adaptive: moves of steps that are forgotten don't hold any more."""


class LearnerHeartbeat(Strict):
    """Sent every few seconds, also while waiting."""

    step: int = Field(ge=0)
    state: Literal["loading", "waiting", "training", "evaluating", "finishing"]
    waiting_for_s: float = Field(default=0, ge=0)
    bytes_served: int = Field(default=0, ge=0)
    """Snapshot payload bytes that left the learner's relay."""
    up_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Payload bytes per second that the relay sent, all streams together; given once for each new measurement."""
    up_limited: bool = False
    """The network held it up nearly all of that time: its ways carry no more. Else they carry at least that."""
    model_stored: bool = False
    """It has put into the store what `store_model` asks for."""


class HeldOut(Lenient):
    """A held-out evaluation of v_step, whoever made it."""

    step: int
    reward: float


class LearnerDirectives(Lenient):
    """What the control service wants. `finish`: checkpoint, save the final model, report done. `abort`: end now."""

    command: Literal["run", "pause", "finish", "abort"]
    reason: str = ""
    staleness_budget: int
    publish_period: int
    evaluated_step: int | None = None
    """The version of the newest held-out evaluation, whoever made it."""
    evaluated_reward: float | None = None
    evaluations: list[HeldOut] = Field(default_factory=list)
    """The newest few: more than one may have ended between two answers."""
    staleness_bound: int | None = None
    """The owner's bound, if S is adaptive."""
    store_model: bool = False
    """Put the model's files into the store that so far are only on the Hugging Face Hub: a node did not get them."""

    @property
    def results(self) -> list[tuple[int, float]]:
        """Step and reward of the evaluations that are told of, oldest version first."""
        found = {e.step: e.reward for e in self.evaluations}
        if self.evaluated_step is not None and self.evaluated_reward is not None:
            found[self.evaluated_step] = self.evaluated_reward
        return sorted(found.items())


class ReplayStep(Lenient):
    """A step that was on record and is forgotten again: the groups that it was made from, in order."""

    step: int
    work_items: list[str]


class ReadyAnswer(LearnerDirectives):
    """`replay`: the steps after `resume_step`, without a gap, so that they can be made again from the same groups."""

    replay: list[ReplayStep] = Field(default_factory=list)


class TrajectoryRef(Lenient):
    """An accepted file and the groups in it that are still to be trained on."""

    seq: int
    """Grows with acceptance; the cursor."""
    key: str
    size: int
    blake3: str
    node_id: str
    work_items: list[str]
    audits_passed: int = 0
    """Of its node's groups, those that have passed an audit."""
    interruptible: bool = False
    """Its node's machine may be taken away."""
    group_sizes: dict[str, int] = Field(default_factory=dict)
    """Completions of each of these groups, of which the file has `app.protocol.pruning.kept` many; of a group that is
    not named, as many as the job's `group_size`."""
    written_by: dict[str, list[str]] = Field(default_factory=dict)
    """Nodes that sampled part of a group before `node_id`, where there are any."""
    heldout: bool = False
    """Its groups are answers to held-out prompts: to be audited, all of them, and never trained on."""
    greedy: list[str] = Field(default_factory=list)
    """Those of them that were to be the likeliest answers."""


class TrajectoryPage(Lenient):
    """A page of the index."""

    items: list[TrajectoryRef]
    cursor: int
    quarantined: list[str] = Field(default_factory=list)
    """All nodes of the job that are in quarantine."""


class PublishedDelta(Strict):
    """What leads to a version from `base`. `stored`: its manifest and all chunks are in the object store."""

    base: int = Field(ge=0)
    bytes: int = Field(ge=1)
    chunks: int = Field(ge=1)
    stored: bool = False


class Published(Strict):
    """A version is complete in the learner's relay (and in the store, when `stored`)."""

    version: int = Field(ge=0)
    bytes: int = Field(ge=1)
    chunks: int = Field(ge=1)
    relay_url: str = Field(max_length=500)
    stored: bool
    """True once manifest and all chunks are in the object store."""
    delta: PublishedDelta | None = None
    delta_share: float | None = Field(default=None, ge=0)
    """Bytes of the delta, or what they would have been, over those of the version."""
    note: str = Field(default="", max_length=500)
    """Why there is no delta."""


DropReason = Literal["stale", "invalid", "unscored", "wrong_reward"]
"""stale: over the staleness budget. invalid: not what was asked for. unscored: its reward can't be computed on the
learner's side. wrong_reward: its node's rewards are not those that the learner finds."""


class DroppedGroup(Strict):
    """A group that will never be trained on, and why."""

    work_item: str
    reason: DropReason
    lag: int | None = None
    """t − x when it was dropped, x the version of its oldest token; None if that is not known."""


class Drops(Strict):
    """Groups that will never be trained on, told at once by a learner that waits."""

    step: int = Field(ge=0)
    """Completed steps."""
    dropped: list[DroppedGroup] = Field(min_length=1)


class StepReport(Strict):
    """One learner step. Step numbers start at 1; step t makes v_t out of v_{t-1}."""

    step: int = Field(ge=1)
    t_train: float = Field(ge=0)
    """Seconds of active training."""
    t_idle: float = Field(ge=0)
    """Seconds of waiting for admissible rollouts before it."""
    reward: float
    trained: list[str]
    """Work items consumed."""
    dropped: list[DroppedGroup] = Field(default_factory=list)
    told: list[DroppedGroup] = Field(default_factory=list)
    """Dropped since the step before and told at once (`Drops`): only counted in this step's record."""
    lags: dict[int, int]
    """Version lag t − x, with t = step − 1 → number of rollouts."""
    metrics: dict[str, float] = Field(default_factory=dict)
    staleness: StalenessMove | None = None


class EvalReport(Strict):
    """Held-out reward of v_step."""

    step: int = Field(ge=0)
    reward: float
    prompts: int = Field(ge=1)
    initial: bool = False
    final: bool = False


class Done(Strict):
    """The learner's last word."""

    status: Literal["succeeded", "finished", "failed"]
    """finished: it obeyed `finish`; succeeded: it met the job's stop rule."""
    reason: str = Field(default="", max_length=2000)
    step: int = Field(ge=0)
    final_prefix: str | None = None
