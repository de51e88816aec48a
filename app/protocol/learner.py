"""What the learner and the control service say to each other.

All paths are under `/v1/jobs/{job}/learner` with the job's learner token. `epoch` fences: each `start` gets a new one
and every later call must carry it in the header `Echo2-Epoch`; an older learner is answered 409 and must end.

| call | body → answer |
|---|---|
| `POST /start` | StartRequest → StartAnswer |
| `POST /ready` | Ready → LearnerDirectives: model and task load, v0 can be published; only then nodes are rented |
| `POST /heartbeat` | LearnerHeartbeat → LearnerDirectives |
| `GET /trajectories?after=&wait_s=` | → TrajectoryPage (long poll; oldest first) |
| `POST /published` | Published → LearnerDirectives |
| `POST /steps` | StepReport → LearnerDirectives; idempotent by step |
| `POST /evals` | EvalReport → LearnerDirectives |
| `POST /done` | Done → 204 |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.protocol.base import Lenient, Strict
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


class AssetInfo(Strict):
    """A small file of the model (config, tokenizer) that was put into the store under `jobs/{job}/model/{path}`."""

    path: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    size: int
    blake3: str


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


class LearnerHeartbeat(Strict):
    """Sent every few seconds, also while waiting."""

    step: int = Field(ge=0)
    state: Literal["loading", "waiting", "training", "evaluating", "finishing"]
    waiting_for_s: float = Field(default=0, ge=0)
    bytes_served: int = Field(default=0, ge=0)
    """Snapshot payload bytes that left the learner's relay."""


class LearnerDirectives(Lenient):
    """What the control service wants. `finish`: checkpoint, save the final model, report done. `abort`: end now."""

    command: Literal["run", "pause", "finish", "abort"]
    reason: str = ""
    staleness_budget: int
    publish_period: int


class TrajectoryRef(Lenient):
    """An accepted file and the groups in it that are still to be trained on."""

    seq: int
    """Grows with acceptance; the cursor."""
    key: str
    size: int
    blake3: str
    node_id: str
    work_items: list[str]


class TrajectoryPage(Lenient):
    """A page of the index."""

    items: list[TrajectoryRef]
    cursor: int


class Published(Strict):
    """A version is complete in the learner's relay (and in the store, when `stored`)."""

    version: int = Field(ge=0)
    bytes: int = Field(ge=1)
    chunks: int = Field(ge=1)
    relay_url: str = Field(max_length=500)
    stored: bool
    """True once manifest and all chunks are in the object store."""


class DroppedGroup(Strict):
    """A group that will never be trained on, and why."""

    work_item: str
    reason: Literal["stale", "invalid"]


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
    lags: dict[int, int]
    """Version lag t − x, with t = step − 1 → number of rollouts."""
    metrics: dict[str, float] = Field(default_factory=dict)


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
