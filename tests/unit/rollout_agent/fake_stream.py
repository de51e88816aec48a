"""A streaming engine whose tokens are a function of what they follow, and a bench for the continuous worker."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from app.protocol import trajectory
from app.protocol.errors import BadInput, IntegrityError, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import Weights
from app.rollout_agent.delivery import Delivery
from app.rollout_agent.engines.base import Completion, EngineDied, Load, Span, Tainted
from app.rollout_agent.flow import Filling
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.partials import Partials
from app.rollout_agent.sampling import Sampler
from app.rollout_agent.stream import StreamWorker
from app.rollout_agent.text_side import TextSide
from app.snapshots.manifest import Manifest
from tests.unit.rollout_agent.fakes import Clock, Echo, Letters, Wire, accept, pool, rows_of

GROUP, MAX_TOKENS = 4, 24
STOP = 46
"""The token that ends a text: a full stop."""


def next_token(context: Sequence[int], odds: int = 12) -> tuple[int, float]:
    """The token after a context, and its log-prob: the same for every engine, seed and version."""
    digest = hashlib.blake2b(repr(list(context)).encode(), digest_size=4).digest()
    token = STOP if digest[0] % odds == 0 else 97 + digest[1] % 26
    return token, -(digest[2] + 1) / 256


def in_one_go(prompt_ids: Sequence[int], max_tokens: int = MAX_TOKENS, odds: int = 12) -> tuple[list[int], list[float]]:
    """What comes of a prompt that nothing interrupts."""
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < max_tokens and STOP not in ids:
        token, logprob = next_token([*prompt_ids, *ids], odds)
        ids.append(token)
        logprobs.append(logprob)
    return ids, logprobs


@dataclass(eq=False)
class Running:
    """One completion in the engine."""

    prompt_ids: Sequence[int]
    seed: int
    max_tokens: int
    spans: list[Span]
    done: asyncio.Future[Completion]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class FakeStream:
    """Each `step` gives every running completion one token; `seats` run at a time, the others wait.

    The tests set how it fails: `taints` so many installs leave no version, `refuses` a prompt.
    """

    def __init__(self, *, on_swap: str = "continue", seats: int = 10**6, odds: int = 12) -> None:
        self.version: int | None = 0
        self.quantisation: str | None = None
        self.tokenizer: Any = Letters()
        self.running: list[Running] = []
        self.seats = seats
        self.odds = odds
        self.preemptions = 0
        self.cache_used = 0.1
        self.taints = 0
        self.loads = 0
        self.refuses: str | None = None
        self.seeds: list[int] = []
        self.asked = 0
        self.most = 0
        self.closed = False
        self.deaf = False
        self.stays_dead = False
        self.patience_s = 1500.0
        self.weights: Weights | None = None
        self._on_swap = on_swap

    async def load(self, model_dir: Path) -> None:
        if self.stays_dead:
            raise Unavailable("no engine here")
        self.loads += 1

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        if self.taints:
            self.taints -= 1
            self.die(0)
            raise Tainted("half of it is there")
        self.version = version
        for run in self.running:
            run.spans.append(Span(version, len(run.ids)))
        if self._on_swap == "resubmit":
            await self.abort()

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        if self.version is None:
            raise Unavailable("no version")
        if self.refuses is not None and [ord(c) for c in self.refuses] == list(prompt_ids)[: len(self.refuses)]:
            raise BadInput("this prompt is too long")
        assert max_tokens > 0
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        run = Running(list(prompt_ids), seed, max_tokens, [Span(self.version, 0)], done)
        self.asked += 1
        self.seeds.append(seed)
        self.running.append(run)
        self.most = max(self.most, len(self.running))
        try:
            return await done
        finally:
            self.running = [other for other in self.running if other is not run]

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float) -> list[float]:
        return [next_token([*prompt_ids, *completion_ids[:i]])[1] for i in range(len(completion_ids))]

    def step(self) -> None:
        """One token for everyone who has a seat."""
        for run in [run for run in self.running if not run.done.done()][: self.seats]:
            token, logprob = next_token([*run.prompt_ids, *run.ids], self.odds)
            run.ids.append(token)
            run.logprobs.append(logprob)
            if token == STOP:
                self._end(run, "stop")
            elif len(run.ids) == run.max_tokens:
                self._end(run, "length")

    def _end(self, run: Running, reason: Any) -> None:
        if not run.done.done():
            run.done.set_result(Completion(run.ids, run.logprobs, reason, tuple(run.spans)))

    def die(self, lost: int = 3) -> None:
        """The process ends; each completion loses so many tokens, as far as is known."""
        self.version = None
        for run in self.running:
            if not run.done.done():
                run.done.set_exception(EngineDied("killed", tokens=min(lost, len(run.ids))))

    async def abort(self) -> None:
        if self.deaf:
            return
        for run in self.running:
            self._end(run, "abort")

    async def load_figures(self) -> Load:
        alive = sum(not run.done.done() for run in self.running)
        seated = min(alive, self.seats)
        return Load(seated, alive - seated, self.cache_used, self.preemptions)

    async def healthy(self, timeout_s: float) -> bool:
        return self.version is not None

    async def close(self) -> None:
        self.closed = True


class Mortal(FakeStream):
    """Takes nothing once it has died, until it is loaded again; never takes `misfit`."""

    def __init__(self, misfit: int | None = None, *, odds: int = 12) -> None:
        super().__init__(odds=odds)
        self.dead = False
        self.misfit = misfit

    def die(self, lost: int = 3) -> None:
        super().die(lost)
        self.dead = True

    async def load(self, model_dir: Path) -> None:
        await super().load(model_dir)
        self.dead = False

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        if self.dead or version == self.misfit:
            raise Unavailable("the engine does not run") if self.dead else IntegrityError("it is of another model")
        await super().install(payload, manifest, version)


class Desk:
    """The control service: groups of four of ever new prompts, as many as are asked for while `left` lasts."""

    def __init__(self, left: int = 10**6, **answers: Any) -> None:
        self.left = left
        self.leased: dict[str, dict[str, Any]] = {}
        self.partials: dict[str, dict[str, Any]] = {}
        """Item → reference, for those that were begun elsewhere; leased before any others."""
        self.deadline_s = 60.0
        self._ids = itertools.count()
        self._slots = itertools.count()
        self.wire = Wire(
            {
                "work": self._work,
                "trajectories": accept,
                "uploads": self._upload,
                "partials": self._take,
                **answers,
            }
        )

    def _work(self, body: dict[str, Any]) -> httpx.Response:
        again = [self.leased[item] | {"partial": reference} for item, reference in self.partials.items()]
        self.partials.clear()
        count = max(0, min(self.left, body["max_items"] - len(again)))
        self.left -= count
        fresh = [
            {"id": f"w{n}", "prompt_index": n, "group_size": GROUP, "seed": n, "deadline_s": self.deadline_s}
            for n in itertools.islice(self._ids, count)
        ]
        items = [*again, *fresh]
        self.leased.update({item["id"]: item for item in items})
        if not items:
            return httpx.Response(200, json={"items": [], "reason": "no work"})
        return httpx.Response(200, json={"items": items, "upload": {"key": "unused", "url": "http://store/unused"}})

    def _upload(self, body: dict[str, Any]) -> httpx.Response:
        key = f"{body['policy_version']}/{next(self._slots)}"
        return httpx.Response(200, json={"key": key, "url": f"http://store/{key}"})

    def _take(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json={"taken": body["work_items"]})

    def reference(self, data: bytes, key: str = "partial") -> dict[str, Any]:
        """A stored file, as a work item refers to it."""
        from blake3 import blake3

        self.wire.objects[f"/{key}"] = data
        return {"key": key, "url": f"http://store/{key}", "size": len(data), "blake3": blake3(data).hexdigest()}

    @property
    def committed(self) -> list[str]:
        """Items, in the order of their commit."""
        return [item for body in self.wire.of("trajectories") for item in body["work_items"]]

    @property
    def rows(self) -> list[trajectory.Rollout]:
        """All rows that were committed or handed over, in the order of their files."""
        return [row for file in self.wire.files for row in rows_of(file)]


class Shift:
    """A continuous worker at a desk, and everything around it. Use as `async with`."""

    def __init__(self, engine: FakeStream, desk: Desk, *, task: Echo | None = None, floor: int | None = None) -> None:
        self.engine = engine
        self.desk = desk
        self.floor = floor
        self.clock = Clock()
        self.ledger = WorkLedger(self.clock)
        self.version: int | None = 0
        self.revive: Callable[[], Awaitable[None]] = self._revive
        self.revived = 0
        self._task = task or Echo()
        self._pools = (pool(), pool())
        self._life: asyncio.Task[None] | None = None

    async def _revive(self) -> None:
        if self.engine.version is None:
            self.revived += 1
            self.engine.version = self.version

    async def __aenter__(self) -> Shift:
        score_pool, text_pool = (p.__enter__() for p in self._pools)
        client, text = self.desk.wire.client(self.clock), TextSide(self._task, Letters())
        sleep = self.clock.sleep
        self.worker = StreamWorker(
            client,
            self.engine,
            text,
            WorkSource(client, self.ledger, lambda: self.version, clock=self.clock, sleep=self._pause),
            Delivery(client, text, self.ledger, score_pool, max_upload_bytes=10**6, clock=self.clock, sleep=sleep),
            Partials(
                client,
                self.ledger,
                max_tokens=MAX_TOKENS,
                max_upload_bytes=10**6,
                quantisation=lambda: self.engine.quantisation,
                oldest_admissible=lambda: self.floor,
            ),
            Sampler(self.engine, self._again, self.ledger, clock=self.clock, sleep=sleep),
            self.ledger,
            sampling=SamplingSpec(max_tokens=MAX_TOKENS),
            filling=Filling(GROUP),
            text_pool=text_pool,
            oldest_admissible=lambda: self.floor,
            clock=self.clock,
            look_s=3600.0,
        )
        self._life = asyncio.create_task(self.worker.run())
        if self.version is not None:
            self.worker.installed()
        return self

    async def _again(self) -> None:
        await self.revive()

    async def _pause(self, _: float) -> None:
        # No work: let the test go on, and ask again when it looks.
        await asyncio.sleep(0.001)

    @property
    def life(self) -> asyncio.Task[None]:
        """The running worker."""
        assert self._life is not None
        return self._life

    async def until(self, true: Callable[[], bool], what: str, *, steps: bool = True) -> None:
        """Let the engine work until something is true; or only wait."""
        async with asyncio.timeout(15):
            while not true():
                assert not self.life.done() or true(), f"the worker has ended: {self.life}"
                if steps:
                    self.engine.step()
                # Threads encode and score: the loop has to come to their answers.
                await asyncio.sleep(0.001)
        assert true(), what

    async def drained(self, within_s: float = 0.0) -> None:
        """Drain, and wait for the end."""
        self.worker.drain(within_s)
        await asyncio.wait_for(self.life, 15)

    async def __aexit__(self, *_: object) -> None:
        self.life.cancel()
        await asyncio.gather(self.life, return_exceptions=True)
        for p in self._pools:
            p.__exit__(None, None, None)
