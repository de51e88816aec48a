"""What a rollout agent and the control service say to each other.

All paths are under `/v1`. An agent joins with a one-time join token and from then on uses its node token, which opens
only `/v1/nodes/{its own id}/…`.

| call | body → answer |
|---|---|
| `POST /nodes/progress` (join token, which it does not use up) | StartProgress → 204 |
| `POST /nodes/join` (join token) | JoinRequest → JoinAnswer |
| `POST /nodes/{id}/heartbeat` | Heartbeat → Directives |
| `POST /nodes/{id}/work` | WorkRequest → WorkAnswer (waits up to `wait_s` for admission) |
| `POST /nodes/{id}/trajectories` | CommitRequest → CommitAnswer; problem `trajectory_refused` when refused |
| `POST /nodes/{id}/uploads` | UploadRequest → UploadSlot: where to put one more file |
| `POST /nodes/{id}/partials` | CommitRequest → PartialAnswer: groups that somebody else has to finish |
| `GET /nodes/{id}/snapshots/{version}?first=&count=` | → SnapshotUrls, the object-store path |
| `POST /nodes/{id}/reports` | Report (a lying upstream, a fault) → 204 |
| `POST /nodes/{id}/leave` | Leave → 204 |
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, field_validator

from app.protocol.base import Lenient, Strict
from app.protocol.hub import HubRef
from app.protocol.job import SamplingSpec
from app.protocol.proofs import Proofs
from app.protocol.pruning import Prune
from app.protocol.startup import MachineFacts, StartProgress
from app.protocol.task_spec import TaskSpec
from app.protocol.work import MOST


class NodeState(StrEnum):
    """joining → warming (fetching a snapshot) → active → draining → gone; lost after missed heartbeats."""

    JOINING = "joining"
    WARMING = "warming"
    ACTIVE = "active"
    DRAINING = "draining"
    GONE = "gone"
    LOST = "lost"


class JoinRequest(Strict):
    """First words of a node."""

    agent_version: str = Field(max_length=50)
    engine: str = Field(max_length=50)
    gpu_name: str = Field(default="", max_length=200)
    relay_url: str | None = Field(default=None, max_length=500)
    """Where peers reach this node's relay; None if the machine has no open port."""
    facts: MachineFacts | None = None
    """What the machine has; held against what was rented."""
    proofs: Proofs = "none"
    """Which its engine can give."""


class AssetRef(Lenient):
    """An immutable file that goes with the model: config, tokenizer, the weights under an adapter."""

    path: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    size: int
    blake3: str
    url: str
    """Presigned GET. With `hub` the object may not be there yet: it is put there once the Hub has failed a node."""
    hub: HubRef | None = None
    """Where the Hugging Face Hub has the same bytes, which are taken from there first."""


class Upstream(Lenient):
    """Where to pull snapshots from, in order of preference."""

    kind: Literal["learner", "peer", "store"]
    url: str = ""
    """Base URL of a relay; empty for the store."""
    node_id: str = ""


class Directives(Lenient):
    """What the control service wants of a node; the whole truth each time, not a difference."""

    upstreams: list[Upstream]
    target_version: int | None
    """The newest published version; None before v0."""
    oldest_admissible: int | None = None
    """A rollout with a token of an older version is of no use any more; None: not known."""
    drain: bool = False
    shutdown: bool = False
    """The lease is over: end the process."""
    lease_expires_in_s: float
    heartbeat_interval_s: float
    reason: str = ""


class JoinAnswer(Lenient):
    """Everything that a node needs, and nothing else."""

    node_id: str
    node_token: str
    job_id: str
    task: TaskSpec
    sampling: SamplingSpec
    group_size: int
    seed: int
    assets: list[AssetRef]
    manifest_public_key: str
    """Ed25519, hex: the only key whose manifests this node may install."""
    relay_token: str
    """Bearer that peers of this job show to each other's relays."""
    uplink_bytes_per_s: float | None
    """Pace of this node's relay; None when unknown."""
    max_upload_bytes: int
    prune: Prune | None = None
    """Which samples of a group go into a file; None: all of them."""
    parameters: int | None = None
    """Of the model: what memory it needs."""
    snapshot_bytes: int | None = None
    """Of a whole version: what disk it needs."""
    task_files: list[AssetRef] = Field(default_factory=list)
    """The files of `task.files`, by their names, with where to get them."""
    rewards: Literal["node", "learner", "both"] = "node"
    """`learner`: this node does not score; it hands in rewards of 0."""
    proofs: Proofs = "none"
    """Which proofs each completion has to come with."""
    directives: Directives


MOST_PER_S = 1e12
Count = Annotated[int, Field(ge=0, le=MOST)]


class BroadcastProgress(Strict):
    """How far the download of the next version is."""

    version: Count
    bytes_have: Count
    bytes_total: Count
    source: Literal["learner", "peer", "store"] | None = None


class Interruption(Strict):
    """What a machine was told about its own end. A `rebalance` only says that it is more likely than before."""

    kind: Literal["interruption", "rebalance"]
    source: Literal["ec2", "gce", "signal"]
    """Who told it: the cloud's metadata service, or SIGTERM."""
    at: AwareDatetime | None = None
    """When the machine goes, by the provider's word, UTC."""
    detail: str = Field(default="", max_length=200)
    """In the words of who told it."""

    @field_validator("at")
    @classmethod
    def _utc(cls, value: datetime | None) -> datetime | None:
        try:
            return None if value is None else value.astimezone(UTC)
        except OverflowError:
            raise ValueError("is beyond all calendars") from None


WasteReason = Literal["interrupted", "engine_died", "stale", "refused", "task_error", "partial_refused"]
"""Why generated tokens were thrown away: cut short and not handed back; lost with the engine; too old to count, or
answered by somebody else meanwhile; the file was refused, or could not be handed in; no reward; what another node had
begun could not be used."""


class Weights(Strict):
    """What an engine says of its own parameters; the same for engines of one kind that hold one version."""

    version: Count
    engine: str = Field(max_length=300)
    """Its kind: all that decides in which form it keeps them."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class Heartbeat(Strict):
    """State of a node. Counters are totals since join; rates are smoothed by the node."""

    state: NodeState
    policy_version: Count | None
    rollouts_per_s: float | None = Field(default=None, ge=0, le=MOST_PER_S)
    """Rollouts per second of generating time: what the node can do, waiting for work not counted."""
    tokens_per_s: float | None = Field(default=None, ge=0, le=MOST_PER_S)
    probed: bool = False
    """Both are those of the self-test, not of work."""
    busy_share: float | None = Field(default=None, ge=0, le=1)
    tokens_generated: Count = 0
    """Completion tokens that this node sampled."""
    tokens_wasted: dict[WasteReason, Count] = Field(default_factory=dict)
    """Those that were of no use, and those begun by other nodes that it could not use."""
    in_flight: Count = 0
    bytes_down: Count = 0
    """All bytes received, any source."""
    bytes_up: Count = 0
    bytes_from: dict[Literal["learner", "peer", "store"], Count] = Field(default_factory=dict)
    """Snapshot payload bytes received, by source."""
    bytes_relayed: Count = 0
    """Snapshot payload bytes served to peers."""
    deltas_applied: Count = 0
    bytes_saved: Count = 0
    """What those versions have more than the deltas that brought them."""
    down_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Payload bytes per second that came from `down_source`; given once for each new measurement. The link carries at
    least that."""
    down_source: Literal["learner", "peer", "store"] | None = None
    up_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Payload bytes per second that its relay sent, all streams together; given once for each new measurement."""
    up_limited: bool = False
    """The network held the relay up nearly all of that time, and there was always something to send: the way to the
    child carries no more. Else it carries at least that."""
    upstream: str = Field(default="", max_length=200)
    """Node id (or `learner`, `store`) that it pulls from now."""
    progress: BroadcastProgress | None = None
    errors: dict[str, Count] = Field(default_factory=dict, max_length=100)
    detail: str = Field(default="", max_length=500)
    start: StartProgress | None = None
    """How far its start has come, or a reload of its engine."""
    weights: Weights | None = None
    """Of the version in force, where the engine was looked at with that one."""
    interruption: Interruption | None = None
    """A notice that no answered heartbeat has carried yet. Who reads it has to bear hearing it twice."""


class StoredPart(Lenient):
    """Something in the object store: a version whole (`base` None), or the delta that leads to it from `base`."""

    version: int
    base: int | None
    bytes: int


class DeltaUrls(Lenient):
    """Presigned GETs of a version's delta."""

    manifest_url: str
    version_url: str
    """The signed document of the version that it leads to."""
    chunk_urls: dict[int, str]


class SnapshotUrls(Lenient):
    """Presigned GETs of a version in the object store."""

    version: int
    manifest_url: str
    """Empty when the store has the version only as a delta."""
    chunk_urls: dict[int, str]
    """Chunk number → URL, for the chunks asked for."""
    delta: DeltaUrls | None = None
    parts: list[StoredPart] = Field(default_factory=list)
    """All that leads to this version."""


class Report(Strict):
    """A fault that the node saw: `upstream_lied` (hash mismatch), `upstream_stalled`, `delta_refused` (it could not be
    applied: the version is fetched whole), `engine_error`, `task_error`, `hub_failed` (a model file did not come from
    the Hugging Face Hub: it is wanted of the store), `handed_back` (work that this node will not finish)."""

    kind: Literal[
        "upstream_lied", "upstream_stalled", "delta_refused", "engine_error", "task_error", "hub_failed", "handed_back"
    ]
    subject: str = Field(default="", max_length=200)
    """Node id of the upstream, the file, or what failed."""
    version: Count | None = None
    detail: str = Field(default="", max_length=1000)
    work_items: list[str] = Field(default_factory=list, max_length=4096)
    """Of `engine_error`, `handed_back`: what is given back because of it. Of `task_error` it is the subject."""


class Leave(Strict):
    """The node's last word."""

    reason: str = Field(max_length=500)
    unfinished: list[str] = Field(default_factory=list, max_length=4096)
    """Work items that it hands back."""
    tokens_generated: Count = 0
    tokens_wasted: dict[WasteReason, Count] = Field(default_factory=dict)
    """As in a heartbeat: the last totals."""
    unfit: bool = False
    """The machine can't do this job, and won't when it is rented again."""
