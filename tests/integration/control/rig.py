"""The control service in process, and players for the learner and the nodes that talk to it by HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from blake3 import blake3
from fastapi import FastAPI
from sqlalchemy import select

from app.api.deps import Services
from app.fleet.core import Core
from app.fleet.supervisor import Supervisor
from app.main import build_services, create_app
from app.protocol.learner import TrajectoryRef
from app.protocol.node import JoinAnswer
from app.protocol.trajectory import Rollout, encode
from app.protocol.work import UploadSlot, WorkItem
from app.settings import Settings
from app.storage.models import Event, Job, Lease, LedgerEntry, Node
from app.storage.models import WorkItem as WorkItemRow
from providers.base import Provider
from tests.integration.control.fake_provider import FakeProvider, Machine, Rented

ADMIN_KEY = "ek_admin"
WEBHOOK_SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
URL = "http://control.test"
MU = 6.0
"""What every node of these tests delivers, rollouts per second."""
PARAMETERS = 8_000_000_000
GROUP, PROMPTS = 2, 2


class FakeClock:
    """Time that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = float(int(time.time()))

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class FakeSupervisor(Supervisor):
    """Starts no process: the test is the learner."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.started: list[str] = []
        self.running: set[str] = set()

    async def start(self, job_id: str) -> None:
        """Note the start."""
        self.started.append(job_id)
        self.running.add(job_id)

    def alive(self, job: Job) -> bool:
        """Lives until the test kills it; after a restart of the service, as long as it is heard of."""
        return job.id in self.running or super().alive(job)

    def stop(self, job: Job) -> None:
        """Ends with its job."""
        self.running.discard(job.id)


def job_body(**changes: Any) -> dict[str, Any]:
    """A small job; nested parts are merged."""
    body: dict[str, Any] = {
        "name": "spell",
        "model": "tiny",
        "task": {
            "name": "reasoning_gym",
            "params": {"dataset": "spell_backward", "min_word_len": 3},
        },
        "budget_usd": "50",
        "stop": {"steps": 4},
        "staleness_budget": 3,
        "batch": {"prompts": PROMPTS, "group_size": GROUP},
        "sampling": {"max_tokens": 512},
        "fleet": {"interruptible": False, "disk_gb": 10.0},
        # Which groups go out twice is drawn.
        "trust": {"twin_share": 0},
    }
    for name, value in changes.items():
        body[name] = {**body[name], **value} if isinstance(body.get(name), dict) and name != "task" else value
    return body


def machines(*prices_usd: float) -> list[Machine]:
    """Machines m1, m2, … at these prices per hour."""
    return [Machine(f"m{i}", round(price * 1_000_000)) for i, price in enumerate(prices_usd, 1)]


@dataclass
class World:
    """One control service over one database and one provider; it can be killed and started again."""

    state_dir: Path
    database_url: str
    provider: FakeProvider
    clock: FakeClock
    options: dict[str, Any] = field(default_factory=dict)
    app: FastAPI = field(init=False)
    svc: Services = field(init=False)
    http: httpx.AsyncClient = field(init=False)
    supervisors: list[FakeSupervisor] = field(default_factory=list)
    others: Sequence[Provider] = ()
    """Further providers, by their own names."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def settings(self) -> Settings:
        """Fast, on a fake clock."""
        values = {
            "state_dir": self.state_dir,
            "database_url": self.database_url,
            "public_url": URL,
            "admin_key": ADMIN_KEY,
            "webhook_secret": WEBHOOK_SECRET,
            "tick_seconds": 10,
            "heartbeat_seconds": 10,
            "heartbeat_timeout_seconds": 60,
            "reconcile_seconds": 10,
            "offer_refresh_seconds": 1,
            "settle_seconds": 90,
            "join_timeout_seconds": 600,
            "first_nodes": 1,
        }
        return Settings(**{**values, **self.options})

    async def start(self) -> None:
        """Build everything anew over the same database and provider."""
        settings = self.settings()

        def supervise(core: Core) -> Supervisor:
            self.supervisors.append(FakeSupervisor(core))
            return self.supervisors[-1]

        self.svc = build_services(
            settings,
            providers={p.name: p for p in (self.provider, *self.others)},
            clock=self.clock,
            supervisor=supervise,
        )
        self.app = create_app(settings, services=self.svc, loop=False)
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self.app.router.lifespan_context(self.app))
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=self.app),
                base_url=URL,
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
                timeout=30,
            )
        )

    async def stop(self) -> None:
        """End this process."""
        await self._stack.aclose()

    async def restart(self) -> None:
        """Another process takes over."""
        await self.stop()
        await self.start()

    @property
    def supervisor(self) -> FakeSupervisor:
        """The one of the running service."""
        return self.supervisors[-1]

    async def round(self, seconds: float = 0.0) -> None:
        """Let time pass, then one round of the loop with all that it sets in motion."""
        self.clock.advance(seconds)
        await self.svc.loop.round()
        await self.svc.controller.leases.drain_tasks()

    async def rounds(self, count: int, seconds: float = 10.0, *players: Node_ | Learner) -> None:
        """Several rounds; the players' hearts beat in each."""
        for _ in range(count):
            self.clock.advance(seconds)
            for player in players:
                await player.beat()
            await self.round()

    async def create(self, **changes: Any) -> str:
        """Post a job; its id."""
        answer = await self.http.post("/v1/jobs", json=job_body(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def get(self, path: str, **params: Any) -> Any:
        """JSON of a read."""
        answer = await self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def job(self, job_id: str) -> Any:
        """The job as read."""
        return await self.get(f"/v1/jobs/{job_id}")

    async def events(self, job_id: str | None = None) -> list[Event]:
        """All events, oldest first."""
        async with self.svc.core.db.read() as session:
            query = select(Event).order_by(Event.id)
            return list(await session.scalars(query.where(Event.job_id == job_id) if job_id else query))

    async def kinds(self, job_id: str | None = None) -> list[str]:
        """Their kinds."""
        return [e.kind for e in await self.events(job_id)]

    async def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        async with self.svc.core.db.read() as session:
            return list(await session.scalars(select(Lease).order_by(Lease.created_at, Lease.id)))

    async def ledger(self) -> list[LedgerEntry]:
        """All entries."""
        async with self.svc.core.db.read() as session:
            return list(await session.scalars(select(LedgerEntry).order_by(LedgerEntry.id)))

    async def items(self, job_id: str) -> list[WorkItemRow]:
        """All work items in their order."""
        async with self.svc.core.db.read() as session:
            query = select(WorkItemRow).where(WorkItemRow.job_id == job_id).order_by(WorkItemRow.ordinal)
            return list(await session.scalars(query))

    async def node_row(self, node_id: str) -> Node:
        """A node as it is on record."""
        async with self.svc.core.db.read() as session:
            return await session.get_one(Node, node_id)

    async def ready_learner(self, job_id: str, nodes: float = 1.0, **ready: Any) -> Learner:
        """A learner that has loaded, published v0 and evaluated; `nodes` machines will be needed."""
        await self.round()
        learner = Learner(self, job_id)
        await learner.start()
        await learner.ready(nodes, **ready)
        await learner.publish(0)
        await learner.evaluate(0, 0.1, initial=True)
        return learner

    async def join(self, rented: Rented) -> Node_:
        """The machine's agent comes up and works."""
        node = Node_(self, rented.env["ECHO2_JOIN_TOKEN"])
        await node.join()
        await node.beat()
        return node

    async def running(self, job_id: str, nodes: float = 1.0) -> tuple[Learner, list[Node_]]:
        """A job whose machines are rented and work."""
        learner = await self.ready_learner(job_id, nodes)
        await self.round()
        await self.round(10)
        return learner, [await self.join(r) for r in self.provider.live() if r.env]


@asynccontextmanager
async def world(
    state_dir: Path, database_url: str, provider: FakeProvider, *, others: Sequence[Provider] = (), **options: Any
) -> AsyncIterator[World]:
    """A running world; ended at the end."""
    assert isinstance(provider.clock, FakeClock)
    made = World(state_dir, database_url, provider, provider.clock, options, others=others)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


class Learner:
    """Speaks the learner's side of app/protocol/learner.py."""

    def __init__(self, world: World, job_id: str) -> None:
        self.world = world
        self.job_id = job_id
        self.epoch = 0
        self.step = 0
        self.command = "run"
        self.last_step = 0

    async def post(self, call: str, body: dict[str, Any], *, epoch: int | None = None) -> httpx.Response:
        """One call, whatever its answer."""
        token = self.world.svc.core.secrets.learner_token(self.job_id)
        headers = {
            "Authorization": f"Bearer {token}",
            "Echo2-Epoch": str(self.epoch if epoch is None else epoch),
        }
        return await self.world.http.post(f"/v1/jobs/{self.job_id}/learner/{call}", json=body, headers=headers)

    async def tell(self, call: str, body: dict[str, Any]) -> None:
        """One call that must go well; its directive is kept."""
        answer = await self.post(call, body)
        assert answer.is_success, answer.text
        if answer.status_code == 200 and "command" in answer.json():
            self.command = answer.json()["command"]

    async def start(self) -> None:
        """A new process."""
        answer = await self.post("start", {"pid": 1, "host": "test"})
        assert answer.status_code == 200, answer.text
        self.epoch, self.last_step = answer.json()["epoch"], answer.json()["last_step"]
        self.model_revision = answer.json()["model_revision"]

    async def ready(self, nodes: float = 1.0, *, resume_step: int = 0, **changes: Any) -> None:
        """Loaded. The step time is such that `nodes` machines (less a half) keep up with it."""
        rollouts = GROUP * PROMPTS
        body = {
            "resume_step": resume_step,
            "parameters": PARAMETERS,
            "snapshot_bytes": 1000,
            "train_prompts": 50,
            "eval_prompts": 10,
            "t_train_prior": 1.1 * rollouts / (MU * max(0.25, nodes - 0.5)),
            "manifest_public_key": "ab" * 32,
            "assets": [{"path": "config.json", "size": 2, "blake3": "00" * 32}],
            **changes,
        }
        await self.tell("ready", body)
        self.step = resume_step

    async def publish(self, version: int, *, stored: bool = True) -> None:
        """A version."""
        await self.tell(
            "published",
            {"version": version, "bytes": 1000, "chunks": 1, "relay_url": "http://127.0.0.1:9", "stored": stored},
        )

    async def evaluate(self, step: int, reward: float, **flags: Any) -> None:
        """Held-out reward."""
        await self.tell("evals", {"step": step, "reward": reward, "prompts": 10, **flags})

    async def beat(self, state: str = "training") -> None:
        """It lives."""
        await self.tell("heartbeat", {"step": self.step, "state": state})

    async def poll(self, after: int = 0, wait_s: float = 0) -> list[TrajectoryRef]:
        """Accepted files."""
        return [TrajectoryRef.model_validate(item) for item in (await self.page(after, wait_s))["items"]]

    async def page(self, after: int = 0, wait_s: float = 0) -> dict[str, Any]:
        """A page of the index."""
        token = self.world.svc.core.secrets.learner_token(self.job_id)
        answer = await self.world.http.get(
            f"/v1/jobs/{self.job_id}/learner/trajectories",
            params={"after": after, "wait_s": wait_s},
            headers={"Authorization": f"Bearer {token}", "Echo2-Epoch": str(self.epoch)},
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def train(self, groups: Sequence[str], *, t_train: float | None = None, **changes: Any) -> None:
        """One step on these groups."""
        self.step += 1
        body = {
            "step": self.step,
            "t_train": t_train if t_train is not None else 1.0,
            "t_idle": 0.1,
            "reward": 0.5,
            "trained": list(groups),
            "lags": {"0": len(groups) * GROUP},
            **changes,
        }
        await self.tell("steps", body)

    async def done(self, status: str = "succeeded", reason: str = "") -> None:
        """The last word; the process ends."""
        await self.tell("done", {"status": status, "reason": reason, "step": self.step, "final_prefix": "final"})
        self.world.supervisor.running.discard(self.job_id)


class Node_:
    """Speaks the agent's side of app/protocol/node.py."""

    def __init__(self, world: World, join_token: str) -> None:
        self.world = world
        self.join_token = join_token
        self.version = 0
        self.state = "active"
        self.directives: dict[str, Any] = {}
        self.down = self.up = 0
        self.asks = True
        """As every agent it has a request for work under way, though the test may show none."""

    async def join(self) -> None:
        """Use the join token."""
        answer = await self.try_join()
        assert answer.status_code == 200, answer.text
        self.answer = JoinAnswer.model_validate(answer.json())
        self.id, self.token = self.answer.node_id, self.answer.node_token

    async def try_join(self) -> httpx.Response:
        """Whatever the answer."""
        body = {"agent_version": "1", "engine": "paced", "gpu_name": "RTX 4090", "relay_url": "http://10.0.0.1:7070"}
        headers = {"Authorization": f"Bearer {self.join_token}"}
        return await self.world.http.post("/v1/nodes/join", json=body, headers=headers)

    async def post(self, call: str, body: dict[str, Any]) -> httpx.Response:
        """One call, whatever its answer."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return await self.world.http.post(f"/v1/nodes/{self.id}/{call}", json=body, headers=headers)

    async def beat(self, mu: float = MU, **fields: Any) -> None:
        """Its heart beats."""
        answer = await self.post(
            "heartbeat",
            {
                "state": self.state,
                "policy_version": self.version,
                "rollouts_per_s": mu,
                "bytes_down": self.down,
                "bytes_up": self.up,
                **fields,
            },
        )
        assert answer.status_code == 200, answer.text
        self.directives = answer.json()
        if self.asks:
            self.world.svc.core.idle.asked(self.id, self.world.clock())

    async def ask(self, count: int = 100) -> dict[str, Any]:
        """Ask for work without waiting."""
        answer = await self.post("work", {"max_items": count, "policy_version": self.version, "wait_s": 0})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def work(self, count: int = 100) -> tuple[list[WorkItem], UploadSlot | None]:
        """Items and where to put their trajectories."""
        answer = await self.ask(count)
        slot = answer["upload"]
        items = [WorkItem.model_validate(i) for i in answer["items"]]
        return items, UploadSlot.model_validate(slot) if slot else None

    def rollouts(self, items: Sequence[WorkItem], **changes: Any) -> list[Rollout]:
        """Well-made rollouts for these items; `changes` spoil them."""
        return [
            replace(
                Rollout(
                    work_item=item.id,
                    prompt_index=item.prompt_index,
                    sample_index=sample,
                    prompt_ids=[1, 2, 3],
                    completion_ids=[4, 5],
                    logprobs=[-0.1, -0.2],
                    span_versions=[self.version],
                    span_starts=[0],
                    reward=1.0,
                    finish_reason="stop",
                ),
                **changes,
            )
            for item in items
            for sample in range(item.group_size)
        ]

    async def put(self, slot: UploadSlot, data: bytes) -> None:
        """PUT to the presigned URL."""
        answer = await self.world.http.put(slot.url, content=data, headers=slot.headers)
        assert answer.status_code == 200, answer.text

    async def commit(self, slot: UploadSlot, data: bytes, items: Sequence[str], **changes: Any) -> httpx.Response:
        """Commit what was put."""
        body = {"key": slot.key, "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": list(items)}
        return await self.post("trajectories", {**body, **changes})

    async def produce(self, count: int = 100) -> list[str]:
        """Ask, generate, upload, commit until `count` are made or no more is given; the accepted items."""
        accepted: list[str] = []
        while len(accepted) < count:
            items, slot = await self.work(count - len(accepted))
            if slot is None:
                break
            data = encode(self.rollouts(items))
            await self.put(slot, data)
            answer = await self.commit(slot, data, [i.id for i in items])
            assert answer.status_code == 200, answer.text
            accepted += answer.json()["accepted"]
        return accepted

    async def leave(self, reason: str = "drained") -> None:
        """The last word."""
        answer = await self.post("leave", {"reason": reason})
        assert answer.status_code == 204, answer.text


async def settle() -> None:
    """Let tasks that are ready run."""
    for _ in range(5):
        await asyncio.sleep(0)
