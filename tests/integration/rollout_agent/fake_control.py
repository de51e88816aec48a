"""A control service, an object store and a learner's relay in one small server on loopback."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from blake3 import blake3
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.protocol import partial, trajectory
from app.protocol.errors import EchoError, Gone, Refused, Unauthorized
from app.protocol.hub import HubRef
from app.protocol.job import SamplingSpec
from app.protocol.node import AssetRef, Directives, Heartbeat, JoinAnswer, JoinRequest, Leave, NodeState, Report
from app.protocol.proofs import Proofs
from app.protocol.startup import StartProgress
from app.protocol.task_spec import TaskSpec
from app.protocol.work import (
    CommitAnswer,
    CommitRequest,
    PartialAnswer,
    PartialRef,
    UploadRequest,
    UploadSlot,
    WorkAnswer,
    WorkItem,
    WorkRequest,
)
from app.snapshots.manifest import new_key, public_hex
from app.snapshots.relay import Relay
from tests.unit.rollout_agent.tiny import JOB, make_model, new_store, publish, write_model_files

JOIN_TOKEN = "join-once"
NODE_TOKEN = "node-token"
RELAY_TOKEN = "relay-token"
GROUP_SIZE = 2
MAX_TOKENS = 5


async def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


SPELL = TaskSpec(
    name="reasoning_gym", params={"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5, "size": 200}
)


@dataclass
class Control:
    """The server's state, which tests read and turn."""

    root: Path
    base_url: str = ""
    drain: bool = False
    shutdown: bool = False
    target: int | None = 0
    lease_s: float = 600.0
    heartbeat_s: float = 0.1
    refuse: bool = False
    status_of: dict[str, EchoError] = field(default_factory=dict)
    """Call name → error to answer with."""
    give_work: bool = True
    held_version: int | None = None
    """Polls for work under this version are answered only after `release`."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    token_used: bool = False
    uplink: float | None = None
    """Bytes per second that the node's relay may send."""
    calls: list[str] = field(default_factory=list)
    """Names of all calls with the right token, in order."""
    progress: list[StartProgress] = field(default_factory=list)
    """Told before the join."""
    snapshot_bytes: int | None = None
    """Announced at the join."""
    joins: list[JoinRequest] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    leaves: list[Leave] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    leased: dict[str, WorkItem] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)
    """Work item → policy version of its rollouts."""
    refused: int = 0
    max_tokens: int = MAX_TOKENS
    task: TaskSpec = SPELL
    """Its files are in `files`, by `task/` and their names."""
    rewards: Literal["node", "learner", "both"] = "node"
    proofs: Proofs = "none"
    hub: HubRef | None = None
    """Where the model's files of any size are."""
    handed_over: dict[str, PartialRef] = field(default_factory=dict)
    """Work item → its beginning; leased again before anything else."""
    begun: dict[str, list[trajectory.Rollout]] = field(default_factory=dict)
    """Work item → what was taken over of it, whether or not it was leased again."""
    rows: list[trajectory.Rollout] = field(default_factory=list)
    """All that was committed."""
    destroyed: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _slots: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.key = new_key()
        self.store = new_store(self.root / "learner", self.key)
        self.model = write_model_files(self.root / "assets")
        self.relay = Relay(self.store, token=RELAY_TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)

    async def publish(self, version: int, *, announce: bool = True) -> None:
        """A version of other weights, in the relay and (if `announce`) in the directives."""
        state = make_model(self.model, seed=version).state_dict()
        await asyncio.to_thread(publish, self.store, self.key, state, version)
        self.target = version if announce else self.target

    async def publish_misfit(self, version: int) -> None:
        """A version that isn't of this model."""
        await asyncio.to_thread(publish, self.store, self.key, {"stranger": torch.zeros(3)}, version)
        self.target = version

    @property
    def states(self) -> list[NodeState]:
        """States shown, repetitions left out."""
        return [state for state, _ in itertools.groupby(beat.state for beat in self.beats)]

    def directives(self) -> Directives:
        """As things stand."""
        return Directives.model_validate(
            {
                "upstreams": [{"kind": "learner", "url": f"http://127.0.0.1:{self.relay.port}", "node_id": "learner"}],
                "target_version": self.target,
                "drain": self.drain,
                "shutdown": self.shutdown,
                "lease_expires_in_s": self.lease_s,
                "heartbeat_interval_s": self.heartbeat_s,
                "reason": "the test says so" if self.drain or self.shutdown else "",
            }
        )

    def app(self) -> Starlette:
        """The HTTP side."""
        node = "/v1/nodes/n1"
        return Starlette(
            routes=[
                Route("/v1/nodes/progress", self._progress, methods=["POST"]),
                Route("/v1/nodes/join", self._join, methods=["POST"]),
                Route(f"{node}/heartbeat", self._heartbeat, methods=["POST"]),
                Route(f"{node}/work", self._work, methods=["POST"]),
                Route(f"{node}/trajectories", self._commit, methods=["POST"]),
                Route(f"{node}/uploads", self._upload, methods=["POST"]),
                Route(f"{node}/partials", self._take_over, methods=["POST"]),
                Route(f"{node}/reports", self._report, methods=["POST"]),
                Route(f"{node}/leave", self._leave, methods=["POST"]),
                Route("/objects/{key:path}", self._object, methods=["GET", "PUT"]),
                Route("/api/v0/instances/{id}/", self._destroy, methods=["DELETE"]),
            ],
            exception_handlers={EchoError: _problem},
        )

    def _check(self, request: Request, call: str, token: str = NODE_TOKEN) -> None:
        if request.headers.get("authorization") != f"Bearer {token}":
            raise Unauthorized("wrong token")
        self.calls.append(call)
        if call in self.status_of:
            raise self.status_of[call]

    async def _progress(self, request: Request) -> Response:
        self._check(request, "progress", JOIN_TOKEN)
        self.progress.append(StartProgress.model_validate_json(await request.body()))
        return Response(status_code=204)

    async def _join(self, request: Request) -> Response:
        self._check(request, "join", JOIN_TOKEN)
        if self.token_used:
            raise Gone("this join token was used")
        self.token_used = True
        self.joins.append(JoinRequest.model_validate_json(await request.body()))
        assets = [
            AssetRef(
                path=file.name,
                size=file.stat().st_size,
                blake3=blake3(file.read_bytes()).hexdigest(),
                url=f"{self.base_url}/objects/model/{file.name}",
                hub=self.hub if file.suffix == ".jsonl" else None,
            )
            for file in sorted(self.model.iterdir())
        ]
        return _json(
            JoinAnswer(
                node_id="n1",
                node_token=NODE_TOKEN,
                job_id=JOB,
                task=self.task,
                task_files=[
                    AssetRef(path=f.name, size=f.size, blake3=f.blake3, url=f"{self.base_url}/objects/task/{f.name}")
                    for f in self.task.files
                ],
                rewards=self.rewards,
                proofs=self.proofs,
                sampling=SamplingSpec(max_tokens=self.max_tokens),
                group_size=GROUP_SIZE,
                seed=0,
                assets=assets,
                manifest_public_key=public_hex(self.key),
                relay_token=RELAY_TOKEN,
                uplink_bytes_per_s=self.uplink,
                max_upload_bytes=1_000_000,
                snapshot_bytes=self.snapshot_bytes,
                directives=self.directives(),
            )
        )

    async def _heartbeat(self, request: Request) -> Response:
        self._check(request, "heartbeat")
        self.beats.append(Heartbeat.model_validate_json(await request.body()))
        return _json(self.directives())

    async def _work(self, request: Request) -> Response:
        self._check(request, "work")
        asked = WorkRequest.model_validate_json(await request.body())
        if asked.policy_version == self.held_version:
            await asyncio.wait_for(self.release.wait(), 20)
        if not self.give_work and not self.handed_over:
            await asyncio.sleep(min(asked.wait_s, 0.2))
            return _json(WorkAnswer(items=[], reason="no work now"))
        items = [self.leased[item].model_copy(update={"partial": ref}) for item, ref in self.handed_over.items()]
        self.handed_over.clear()
        items = items or [
            WorkItem(id=f"w{n}", prompt_index=n % 20, group_size=GROUP_SIZE, seed=n, deadline_s=300.0)
            for n in itertools.islice(self._ids, min(asked.max_items, 4))
        ]
        self.leased.update({item.id: item for item in items})
        return _json(WorkAnswer(items=items, upload=self._slot()))

    def _slot(self) -> UploadSlot:
        key = f"trajectories/{next(self._slots)}.parquet"
        return UploadSlot(key=key, url=f"{self.base_url}/objects/{key}", headers={"X-Upload": "yes"})

    async def _upload(self, request: Request) -> Response:
        self._check(request, "upload")
        UploadRequest.model_validate_json(await request.body())
        return _json(self._slot())

    async def _take_over(self, request: Request) -> Response:
        self._check(request, "partials")
        asked = CommitRequest.model_validate_json(await request.body())
        table = trajectory.read_table(self._stored(asked))
        expected = {item: trajectory.Expected(self.leased[item].prompt_index, GROUP_SIZE) for item in asked.work_items}
        partial.validate(
            table, expected, newest_version=self.target or 0, max_tokens=self.max_tokens, proofs=self.proofs
        )
        url = f"{self.base_url}/objects/{asked.key}"
        ref = PartialRef(key=asked.key, url=url, size=asked.size, blake3=asked.blake3)
        self.handed_over.update(dict.fromkeys(asked.work_items, ref))
        for row in trajectory.rollouts(table):
            self.begun.setdefault(row.work_item, []).append(row)
        return _json(PartialAnswer(taken=asked.work_items))

    def _stored(self, asked: CommitRequest) -> bytes:
        data = self.files[asked.key]
        assert len(data) == asked.size
        assert blake3(data).hexdigest() == asked.blake3
        return data

    async def _commit(self, request: Request) -> Response:
        self._check(request, "commit")
        asked = CommitRequest.model_validate_json(await request.body())
        data = self._stored(asked)
        if self.refuse:
            self.refused += 1
            raise Refused("reward", "the test refuses everything")
        table = trajectory.read_table(data)
        expected = {item: trajectory.Expected(self.leased[item].prompt_index, GROUP_SIZE) for item in asked.work_items}
        trajectory.validate(
            table, expected, newest_version=self.target or 0, max_tokens=self.max_tokens, proofs=self.proofs
        )
        self.rows += trajectory.rollouts(table)
        self.committed.update(trajectory.oldest_versions(table))
        return _json(CommitAnswer(accepted=asked.work_items))

    @property
    def faults(self) -> list[Report]:
        """Reports of what went wrong; that work is handed back at the end is none."""
        return [report for report in self.reports if report.kind != "handed_back"]

    async def _report(self, request: Request) -> Response:
        self._check(request, "report")
        self.reports.append(Report.model_validate_json(await request.body()))
        return Response(status_code=204)

    async def _leave(self, request: Request) -> Response:
        self._check(request, "leave")
        self.leaves.append(Leave.model_validate_json(await request.body()))
        return Response(status_code=204)

    async def _object(self, request: Request) -> Response:
        key = request.path_params["key"]
        if request.method == "GET" and key in self.files:
            return Response(self.files[key])
        if request.method == "GET":
            return Response(await asyncio.to_thread((self.model / key.removeprefix("model/")).read_bytes))
        assert request.headers["x-upload"] == "yes"
        self.files[key] = await request.body()
        return Response(status_code=200)

    async def _destroy(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer machine-key"
        self.destroyed.append(request.path_params["id"])
        return JSONResponse({"success": True})


class Server:
    """The HTTP server of a Control; can be stopped and started again on the same port."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen."""
        config = uvicorn.Config(
            self._control.app(),
            host="127.0.0.1",
            port=self._port,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        self._server = server
        self._task = asyncio.create_task(server._serve())
        await eventually(lambda: server.started, "the server listens")
        self._port = server.servers[0].sockets[0].getsockname()[1]
        self._control.base_url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Close the port and all connections."""
        assert self._server is not None
        assert self._task is not None
        self._server.should_exit = True
        await asyncio.wait_for(self._task, 10)


@asynccontextmanager
async def running(root: Path) -> AsyncIterator[tuple[Control, Server]]:
    """A control service with v0 published."""
    control = Control(root)
    await control.publish(0)
    await control.relay.start()
    server = Server(control)
    await server.start()
    try:
        yield control, server
    finally:
        await server.stop()
        await control.relay.stop()


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, EchoError)
    body: dict[str, Any] = {"type": error.code, "title": error.title, "status": error.status, "detail": error.detail}
    if isinstance(error, Refused):
        body["reason"] = error.reason
    return JSONResponse(body, status_code=error.status, media_type="application/problem+json")


def _json(message: Any) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
