"""A control service for one job: enough of the learner's protocol to train against, over real HTTP.

It plays the fleet too: whenever few groups wait it samples some from the newest snapshot in the object store and puts
them in as a node would.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from blake3 import blake3
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.learner.model import load
from app.learner.sampling import eos_ids, sample
from app.protocol.job import JobSpec, SnapshotSpec
from app.protocol.trajectory import Rollout, encode
from app.snapshots.codec import decode as decode_snapshot
from app.snapshots.manifest import verify
from app.storage.stores import FolderStore
from app.tasks.prompts import decode, encode_prompt
from app.tasks.registry import load_task
from tests.integration.learner.served import served

JOB, TOKEN = "job-1", "learner-token"


class FakeService:
    """State survives learner processes, as the real one's does."""

    def __init__(self, spec: JobSpec, store: FolderStore, model_folder: Path, task_folder: Path | None = None) -> None:
        # What stands for the fleet here reads whole versions out of the store.
        self.spec = spec.model_copy(update={"snapshot": SnapshotSpec(keyframe_every=1)})
        self.store = store
        self.epoch = 0
        self.command = "run"
        self.steps: dict[int, dict] = {}
        self.rewritten: list[int] = []
        self.history: list[dict] = []
        """Every step report, also of steps that were forgotten and made again."""
        self.replay: dict[int, list[str]] = {}
        self.dropped: list[dict] = []
        self.audits: list[dict] = []
        self.evals: list[dict] = []
        self.published: list[tuple[int, bool]] = []
        self.relay_url = ""
        self.ready: list[dict] = []
        self.done: dict | None = None
        self.beats: list[dict] = []
        self.refuse_steps = False
        self.order: list[str] = []
        self.index: list[dict] = []
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._task = load_task(spec.task, spec.seed, task_folder)
        self._loaded = load(model_folder)
        self._generator = torch.Generator().manual_seed(11)
        self._next_prompt = 0

    # what the learner calls

    def call(self, name: str, body: dict, epoch: str | None, query: dict) -> Response:
        with self.lock:
            self.order.append(name)
            if name != "start" and epoch != str(self.epoch):
                return problem(409, "conflict", f"epoch {epoch} is not the newest")
            if name == "steps" and self.refuse_steps:
                return problem(503, "unavailable", "restarting")
            answer = getattr(self, f"_{name}")(body)
            self.changed.notify_all()
            return answer

    def _start(self, body: dict) -> Response:
        self.epoch += 1
        versions = [v for v, _ in self.published]
        return JSONResponse(
            {
                "job_id": JOB,
                "epoch": self.epoch,
                "spec": self.spec.model_dump(mode="json"),
                "relay_token": "relay-token",
                "last_step": max(self.steps, default=0),
                "published_version": max(versions, default=None),
            }
        )

    def _ready(self, body: dict) -> Response:
        self.ready.append(body)
        for step in [s for s in self.steps if s > body["resume_step"]]:
            self.replay[step] = self.steps.pop(step)["trained"]
        done = max(self.steps, default=0)
        self.replay = {s: items for s, items in self.replay.items() if s > done}
        return self._word({"replay": [{"step": s, "work_items": self.replay[s]} for s in sorted(self.replay)]})

    def _heartbeat(self, body: dict) -> Response:
        self.beats.append(body)
        return self._word()

    def _published(self, body: dict) -> Response:
        self.published.append((body["version"], body["stored"]))
        self.relay_url = body["relay_url"]
        return self._word()

    def _steps(self, body: dict) -> Response:
        if body["step"] in self.steps:
            self.rewritten.append(body["step"])
        self.steps[body["step"]] = body
        self.history.append(body)
        self.replay.pop(body["step"], None)
        return self._word()

    def _drops(self, body: dict) -> Response:
        self.dropped += body["dropped"]
        return self._word()

    def _audits(self, body: dict) -> Response:
        self.audits += body["audits"]
        return JSONResponse({"withdrawn": [], "quarantined": []})

    def _evals(self, body: dict) -> Response:
        self.evals.append(body)
        return self._word()

    def _done(self, body: dict) -> Response:
        self.done = body
        return Response(status_code=204)

    def _word(self, more: dict | None = None) -> Response:
        word = {"command": self.command, "staleness_budget": self.spec.staleness_budget, "reason": "said so"}
        return JSONResponse(word | {"publish_period": self.spec.kappa} | (more or {}))

    def trajectories(self, after: int) -> Response:
        """Items trained at a step on record are left out, all others are handed out again to a new process."""
        with self.lock:
            used = {w for s in self.steps.values() for w in s["trained"] + [d["work_item"] for d in s["dropped"]]}
            used |= {d["work_item"] for d in self.dropped}
            waiting = [w for entry in self.index for w in entry["work_items"] if w not in used]
            if len(waiting) < 2 * self.spec.batch.prompts and any(stored for _, stored in self.published):
                self._roll()
            items = []
            for entry in self.index:
                left = [w for w in entry["work_items"] if w not in used]
                if entry["seq"] > after and left:
                    items.append({**entry, "work_items": left})
            if not items:
                self.changed.wait(0.2)
            return JSONResponse({"items": items, "cursor": max([after, *(i["seq"] for i in items)])})

    # what a fleet would do

    def _roll(self) -> None:
        version = max(v for v, stored in self.published if stored)
        self._load(version)
        spec, model, tokenizer = self.spec, self._loaded.model, self._loaded.tokenizer
        rollouts: list[Rollout] = []
        for _ in range(spec.batch.prompts):
            prompt = self._task.train(self._next_prompt)
            self._next_prompt += 1
            ids = encode_prompt(tokenizer, prompt)
            item = uuid.uuid4().hex
            made = sample(
                model,
                [ids] * spec.batch.group_size,
                max_tokens=spec.sampling.max_tokens,
                temperature=spec.sampling.temperature,
                eos=eos_ids(model, tokenizer),
                generator=self._generator,
            )
            rollouts += [
                Rollout(
                    item,
                    prompt.index,
                    i,
                    ids,
                    c.ids,
                    c.logprobs,
                    [version],
                    [0],
                    0.0 if self.spec.rewards == "learner" else self._task.reward(prompt, decode(tokenizer, c.ids)),
                    c.finish_reason,
                )
                for i, c in enumerate(made)
            ]
        data = encode(rollouts)
        key = f"jobs/{JOB}/trajectories/{version}/{len(self.index)}.parquet"
        self.store.put(key, data)
        self.index.append(
            {
                "seq": len(self.index) + 1,
                "key": key,
                "size": len(data),
                "blake3": blake3(data).hexdigest(),
                "node_id": "node-1",
                "work_items": list(dict.fromkeys(r.work_item for r in rollouts)),
            }
        )

    def _load(self, version: int) -> None:
        prefix = f"jobs/{JOB}/snapshots/{version}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "payload"
            chunks = sorted(self.store.list(f"{prefix}/chunks/"), key=lambda o: int(o.key.rsplit("/", 1)[1]))
            buffer = io.BytesIO()
            for chunk in chunks:
                buffer.write(self.store.get(chunk.key))
            path.write_bytes(buffer.getvalue())
            state = decode_snapshot(path)
        missing, unexpected = self._loaded.model.load_state_dict(state, strict=False)
        assert set(missing) <= {"lm_head.weight"}
        assert not unexpected

    def manifest(self, version: int, public_key: str):
        document = self.store.get(f"jobs/{JOB}/snapshots/{version}/manifest.json")
        return verify(document, public_key=public_key, job_id=JOB)

    def wait(self, what, timeout_s: float = 90.0) -> None:
        """Until `what()` holds."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not what():
                assert time.monotonic() < deadline, (
                    f"waited {timeout_s} s; steps {sorted(self.steps)}, {self.published}"
                )
                self.changed.wait(0.2)


def problem(status: int, code: str, detail: str) -> Response:
    body = {"type": f"urn:echo2:{code}", "title": code, "status": status, "detail": detail}
    return JSONResponse(body, status_code=status, media_type="application/problem+json")


def serving(service: FakeService) -> AbstractContextManager[str]:
    """The service on a free port of loopback; its URL."""

    async def post(request: Request) -> Response:
        body = await request.json()
        epoch = request.headers.get("Echo2-Epoch")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return problem(401, "unauthorized", "who?")
        return await run_in_threadpool(service.call, request.path_params["name"], body, epoch, {})

    async def get(request: Request) -> Response:
        if request.headers.get("Echo2-Epoch") != str(service.epoch):
            return problem(409, "conflict", "not the newest")
        return await run_in_threadpool(service.trajectories, int(request.query_params["after"]))

    base = f"/v1/jobs/{JOB}/learner"
    app = Starlette(
        routes=[
            Route(f"{base}/trajectories", get, methods=["GET"]),
            Route(f"{base}/{{name}}", post, methods=["POST"]),
        ]
    )
    return served(app)
