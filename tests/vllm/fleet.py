"""A control service on loopback in real time, a learner that is played, and agents as a user has them: processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from blake3 import blake3
from sqlalchemy import select
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from transformers import Qwen3Config

from app.protocol import trajectory
from app.protocol.trajectory import Rollout
from app.snapshots.manifest import Probe, public_hex
from app.snapshots.relay import Relay
from app.snapshots.store import SnapshotStore
from app.storage.models import ItemStatus, Node
from app.storage.stores import FolderStore
from tests.integration.control.fake_provider import FakeProvider, machines_of
from tests.integration.control.rig import FakeClock, Learner, World
from tests.vllm.world import PROBE_IDS
from tests.vllm.world import World as Models

REPOSITORY = Path(__file__).parents[2]
GROUP, MAX_TOKENS, POSITIONS = 4, 300, 512
TASK = {"name": "turns.py:Turns", "limits": {"processes": 1}}
SILENCE_S = 8.0
PATIENT = """
import sys
from app.rollout_agent import agent
from app.rollout_agent.__main__ import run_agent
agent.UNHEARD_S, agent.STOP_GRACE_S, agent.SIGNAL_CUT_S = 30.0, 40.0, 0.0
sys.exit(run_agent())
"""
"""The agent, which after a signal gives its service the seconds that one needs beside two engines on a busy machine,
and its engine none: the model's samples are short, and of some tests none may end by itself."""


class WallClock(FakeClock):
    """Time as it is."""

    def __call__(self) -> float:
        return time.time()


class Keeping(FolderStore):
    """Remembers what was removed."""

    def __init__(self, root: Path, public_url: str, signing_key: bytes) -> None:
        super().__init__(root, public_url=public_url, signing_key=signing_key)
        self.removed: dict[str, bytes] = {}

    def delete(self, key: str) -> None:
        """Remove it, and keep a copy."""
        if self.head(key) is not None:
            self.removed[key] = self.get(key)
        super().delete(key)

    def ever(self, key: str) -> bytes:
        """What is there, or was."""
        return self.removed[key] if key in self.removed else self.get(key)


@dataclass
class Accepted:
    """A group that was accepted, and who had begun it."""

    node: str
    written_by: list[str]
    rows: list[Rollout]


@dataclass
class Machine:
    """One agent's process."""

    process: asyncio.subprocess.Process
    folder: Path

    @property
    def log(self) -> str:
        """What it has said."""
        return (self.folder / "agent.log").read_text(errors="replace")

    def descendants(self) -> list[int]:
        """Processes that work for it, wherever they hang: vLLM's have its folder among their arguments."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.process.pid:
                with contextlib.suppress(OSError):
                    if str(self.folder).encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found


@dataclass
class Fleet:
    """What the tests look at and turn."""

    root: Path
    world: World
    models: Models
    url: str
    job_id: str = ""
    away_for_work: bool = False
    """Requests for work are answered as if the service were away."""
    accepted: dict[str, Accepted] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    """By the id of the rented instance."""
    version: int = -1
    """Published last."""
    _cursor: int = 0

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The service, with the switch in front."""
        if self.away_for_work and scope["type"] == "http" and scope["path"].endswith("/work"):
            await JSONResponse({"detail": "the test says so"}, status_code=503)(scope, receive, send)
            return
        await self.world.app(scope, receive, send)

    async def begin(self) -> None:
        """A job whose learner is ready."""
        self.job_id = await self.world.create(
            task=TASK, staleness_budget=200, batch={"prompts": 32, "group_size": GROUP},
            sampling={"max_tokens": MAX_TOKENS}, learner={"eval_by": "learner"}, fleet={"max_nodes": 2},
        )  # fmt: skip
        core = self.world.svc.core
        self.objects = Keeping(self.root / "state" / "objects", self.url, core.secrets.signing_key())
        core.objects = self.objects
        self.store = SnapshotStore(
            self.root / "learner", job_id=self.job_id, public_key=public_hex(self.models.key)
        )  # fmt: skip
        self.relay = Relay(
            self.store, token=core.secrets.relay_token(self.job_id), host="127.0.0.1", port=0, uplink_bytes_per_s=None
        )
        await self.relay.start()
        await self.world.round()
        self.learner = Learner(self.world, self.job_id)
        await self.learner.start()
        assets = []
        for file in sorted(self.models.folder.iterdir()):
            data = file.read_bytes()
            self.objects.put(f"jobs/{self.job_id}/model/{file.name}", data)
            assets.append({"path": file.name, "size": len(data), "blake3": blake3(data).hexdigest()})
        await self.learner.ready(
            parameters=100_000, t_train_prior=0.01, assets=assets, manifest_public_key=public_hex(self.models.key)
        )
        await self.publish(0)

    async def publish(self, version: int) -> None:
        """A version with a probe, in the learner's relay."""
        probe = Probe(token_ids=PROBE_IDS, logprobs=self.models.logprobs(PROBE_IDS, version))
        made = await asyncio.to_thread(
            self.store.publish,
            self.models.model(version).state_dict(),
            version=version, key=self.models.key, deltas=False, probe=lambda _: probe,
        )  # fmt: skip
        self.version = version
        size = made.snapshot.manifest.payload_bytes
        address = f"http://127.0.0.1:{self.relay.port}"
        told = {"version": version, "bytes": size, "chunks": 1, "relay_url": address, "stored": False}
        await self.learner.tell("published", told)

    async def live(self) -> None:
        """The learner's heart beats, and the service's rounds go on."""
        while True:
            await self.learner.beat()
            await self.world.round()
            await asyncio.sleep(0.5)

    def unmanned(self) -> list[str]:
        """Instances that are rented and have no agent yet."""
        return [r.instance_id for r in self.provider.live() if r.env and r.instance_id not in self.machines]

    @property
    def provider(self) -> FakeProvider:
        """Whose machines are processes of this computer."""
        return self.world.provider

    async def man(self, instance: str, **env: str) -> Machine:
        """Start an agent on a rented machine."""
        folder = self.root / f"machine-{instance}"
        folder.mkdir()
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        with (folder / "agent.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PATIENT,
                cwd=REPOSITORY,
                env={
                    **kept,
                    "ECHO2_CONTROL_URL": self.url,
                    "ECHO2_JOIN_TOKEN": self.provider.rented[instance].env["ECHO2_JOIN_TOKEN"],
                    "ECHO2_AGENT_DIR": str(folder),
                    "ECHO2_DEVICE": "cpu",
                    "HF_HUB_OFFLINE": "1",
                    **env,
                },
                stdout=output, stderr=output,
            )  # fmt: skip
        self.machines[instance] = Machine(process, folder)
        return self.machines[instance]

    async def nodes(self, state: str = "active") -> list[Node]:
        """Nodes in a state, the oldest first."""
        async with self.world.svc.core.db.read() as session:
            query = select(Node).where(Node.job_id == self.job_id, Node.state == state)
            return list(await session.scalars(query.order_by(Node.joined_at)))

    async def read(self) -> dict[str, Accepted]:
        """All that was accepted so far, as the learner gets it."""
        while True:
            page = await self.learner.page(self._cursor)
            if not page["items"]:
                return self.accepted
            for ref in page["items"]:
                for row in trajectory.rollouts(trajectory.read_table(self.objects.get(ref["key"]))):
                    if row.work_item in ref["work_items"]:
                        group = self.accepted.setdefault(
                            row.work_item, Accepted(ref["node_id"], ref["written_by"].get(row.work_item, []), [])
                        )
                        group.rows.append(row)
            self._cursor = page["cursor"]

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Read what is accepted until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{self.logs()}"
            await asyncio.sleep(0.1)
            await self.read()

    async def leased(self, node: str) -> list[str]:
        """Work items that a node has now."""
        items = await self.world.items(self.job_id)
        return [i.id for i in items if i.node_id == node and i.status == ItemStatus.LEASED]

    async def until_busy(self, node: str, groups: int = 4, seconds: float = 60.0) -> None:
        """A node has just been given work."""
        deadline, had = time.monotonic() + seconds, set(await self.leased(node))
        while len(set(await self.leased(node)) - had) < groups:
            assert time.monotonic() < deadline, f"{node} has no work\n{self.logs()}"
            await asyncio.sleep(0.1)

    async def until_active(self, count: int, seconds: float, version: int | None = None) -> list[Node]:
        """So many nodes work (under a version, if one is given)."""
        deadline = time.monotonic() + seconds
        while True:
            found = [n for n in await self.nodes() if version is None or n.policy_version == version]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"not {count} nodes within {seconds:.0f} s\n{self.logs()}"
            for machine in self.machines.values():
                assert machine.process.returncode in (None, 0, -9), self.logs()
            await asyncio.sleep(0.2)

    def logs(self) -> str:
        """The last lines of all agents."""
        return "\n".join(f"--- {m.folder.name}\n" + "\n".join(m.log.splitlines()[-12:]) for m in self.machines.values())

    async def close(self) -> None:
        """End every agent that is left, and the relay."""
        for machine in self.machines.values():
            if machine.process.returncode is None:
                machine.process.terminate()
        for machine in self.machines.values():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(machine.process.wait(), 60)
            if machine.process.returncode is None:
                machine.process.kill()
                await machine.process.wait()
        await self.relay.stop()


def free_port() -> int:
    """A port on loopback that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@asynccontextmanager
async def fleet(root: Path) -> AsyncIterator[Fleet]:
    """A job that has rented two machines on which nothing runs yet."""
    port = free_port()
    url, clock = f"http://127.0.0.1:{port}", WallClock()
    provider = FakeProvider(clock, machines_of(one=0.2, two=0.3, three=0.4))
    options = {
        "public_url": url, "tick_seconds": 1, "reconcile_seconds": 1, "heartbeat_seconds": 0.5,
        "heartbeat_timeout_seconds": SILENCE_S, "join_timeout_seconds": 600, "first_nodes": 2,
        "task_dir": Path(__file__).parent,
        "object_store_url": f"file://{root / 'state' / 'objects'}",
    }  # fmt: skip
    world = World(root / "state", f"sqlite+aiosqlite:///{root / 'echo2.db'}", provider, clock, options)
    models = Models(root / "models")
    shape = Qwen3Config.from_pretrained(models.folder)
    # So that whenever one looks, samples are in the middle of something.
    shape.max_position_embeddings = POSITIONS
    shape.save_pretrained(models.folder)
    await world.start()
    made = Fleet(root, world, models, url)
    config = uvicorn.Config(
        made.serve, interface="asgi3", host="127.0.0.1", port=port, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    await made.begin()
    living = asyncio.create_task(made.live())
    try:
        while len(made.unmanned()) < 2:
            assert not living.done(), living
            await asyncio.sleep(0.1)
        yield made
    finally:
        await made.close()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        server.should_exit = True
        await asyncio.wait_for(serving, 20)
        await world.stop()
        shutil.rmtree(root / "state", ignore_errors=True)
