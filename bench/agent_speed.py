"""One vLLM server, driven by a bare loop and by the agent's worker, in turns; and what a swap takes beyond the load.

The bare loop keeps half as many requests again under way as the engine decodes at once, over the same prompts and with
the same limits, and throws the answers away. Both are measured by the engine's own count of tokens. Turns are short and
neighbours are compared, in changing order, since the machine's own speed may double or halve within minutes; so are
swaps and loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.protocol.errors import Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import Directives, JoinAnswer, JoinRequest
from app.protocol.task_spec import TaskSpec
from app.rollout_agent.bench_model import BenchModel, prepare
from app.rollout_agent.client import NodeClient
from app.rollout_agent.engines.base import Load
from app.rollout_agent.engines.vllm import VllmEngine
from app.rollout_agent.engines.vllm_answers import sampling_params, tokens_made
from app.rollout_agent.engines.vllm_command import VllmOptions
from app.rollout_agent.engines.vllm_life import Life
from app.rollout_agent.faults import Faults
from app.rollout_agent.hosting import StreamHost
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.stream import StreamWorker
from app.rollout_agent.text_side import TextSide
from app.rollout_agent.working import Parts, make_host, make_worker
from app.tasks.base import Prompt
from bench.agent_stub import BASE, Stub

GROUP_SIZE = 8
PROMPTS = 64
SEQUENCES = 64
"""More than two cores decode in one go would only wait for each other."""
WARM_S = 25.0
"""A worker finds out in that time how much the engine takes."""
BARE = SEQUENCES * 3 // 2
"""Under way in the bare loop: samples are equally long and end together, and a shorter queue would be empty then."""
FULL = 0.9
"""A turn is measured from when so much of what the engine decodes at once is under way."""
TURN_S = 60.0
"""So long an engine may take to fill, or to empty."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Letters:
    """Prompts of one length and a reward that costs nothing."""

    name: str = "letters"
    train_size: int = PROMPTS
    heldout_size: int = 1

    def train(self, index: int) -> Prompt:
        """Prompt number `index`."""
        return Prompt(index, f"Write something about the number {index:04d}, please: ", {})

    def heldout(self, index: int) -> Prompt:
        """As the others."""
        return self.train(index)

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """How long the answer is."""
        return float(len(completion_text))


@dataclass
class Rig:
    """An engine with a version installed, and what a worker needs besides."""

    engine: VllmEngine
    host: StreamHost
    model: BenchModel
    max_tokens: int

    @property
    def life(self) -> Life:
        """The server, to be asked without the agent's own code."""
        life = self.engine._life
        assert life is not None
        return life

    async def tokens_per_s(self, seconds: float) -> float:
        """By the engine's own count."""
        began, before = time.perf_counter(), tokens_made(await self.life.http.metrics())
        await asyncio.sleep(seconds)
        after = tokens_made(await self.life.http.metrics())
        return (after - before) / (time.perf_counter() - began)


def joined(max_tokens: int) -> JoinAnswer:
    """What a control service would say."""
    return JoinAnswer(
        node_id="n", node_token="t", job_id="j", task=TaskSpec(name="letters"),
        sampling=SamplingSpec(max_tokens=max_tokens), group_size=GROUP_SIZE, seed=0, assets=[],
        manifest_public_key="", relay_token="", uplink_bytes_per_s=None, max_upload_bytes=1 << 26,
        directives=Directives(upstreams=[], target_version=0, lease_expires_in_s=3600, heartbeat_interval_s=10),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def rig(python: str, max_tokens: int) -> AsyncIterator[Rig]:
    """A server with the tiny model's shape and random weights, which seldom end a completion early."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        model = await asyncio.to_thread(prepare, "tiny", Path(folder))
        options = VllmOptions(
            python=python, device="cpu", work_dir=Path(folder) / "engine", threads=1, max_sequences=SEQUENCES
        )
        engine = VllmEngine(options)
        host = make_host(engine, model.folder, pool)
        assert isinstance(host, StreamHost)
        try:
            await host.load()
            await host.install(model.snapshot)
            yield Rig(engine, host, model, max_tokens)
        finally:
            await host.close()


@contextlib.asynccontextmanager
async def worker(found: Rig) -> AsyncIterator[tuple[StreamWorker, Stub]]:
    """The agent's worker at work, and what gives it that."""
    stub = Stub(GROUP_SIZE, PROMPTS, joined(found.max_tokens))
    http = stub.client()
    client = NodeClient(BASE, http)
    answer = await client.join(JoinRequest(agent_version="bench", engine="vllm"), "t")
    ledger = WorkLedger(time.monotonic)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        parts = Parts(
            answer, client, ledger, Faults(client, ledger), one, two, lambda: found.engine.version,
            lambda: answer.directives,
        )  # fmt: skip
        made = make_worker(found.host, found.engine, TextSide(Letters(), found.engine.tokenizer), parts)
        assert isinstance(made, StreamWorker)
        made.installed()
        running = asyncio.create_task(made.run())
        try:
            yield made, stub
            made.drain(2.0)
            await asyncio.wait_for(running, 30)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await http.aclose()


@contextlib.asynccontextmanager
async def bare(found: Rig, concurrency: int) -> AsyncIterator[None]:
    """Requests without an agent, always so many."""
    task, blueprint = Letters(), found.engine._ready()
    prompts = [list(found.engine.tokenizer(task.train(n).text)["input_ids"]) for n in range(PROMPTS)]

    async def ask(number: int) -> None:
        turn = 0
        while True:
            seed = number * 1_000_000 + turn
            wanted = sampling_params(seed=seed, max_tokens=found.max_tokens, temperature=1.0, eos=blueprint.eos)
            prompt = prompts[(number // GROUP_SIZE + turn) % PROMPTS]
            await found.life.http.generate(prompt, wanted, request_id=f"bare-{number}-{turn}", salt="0")
            turn += 1

    tasks = [asyncio.create_task(ask(n)) for n in range(concurrency)]
    try:
        yield
    finally:
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def fed(stub: Stub) -> AsyncIterator[None]:
    """Work for the worker."""
    stub.open = True
    try:
        yield
    finally:
        stub.open = False


async def turn(
    found: Rig, seconds: float, driver: AbstractAsyncContextManager[None], level: Callable[[], int]
) -> tuple[float, float]:
    """One driver from an idle engine to an idle engine: tokens per second while it was full, and how much of a core
    this process took then. `level`: requests that it keeps under way."""
    async with driver:
        await until(found, lambda load: load.running >= FULL * min(SEQUENCES, level()), "the engine is full")
        began, before = time.perf_counter(), time.process_time()
        speed = await found.tokens_per_s(seconds)
        own = (time.process_time() - before) / (time.perf_counter() - began)
    await until(found, lambda load: not load.running + load.waiting, "the engine is idle")
    return speed, own


async def until(found: Rig, seen: Callable[[Load], bool], what: str) -> None:
    """Raises Unavailable when it takes too long."""
    deadline = time.monotonic() + TURN_S
    while not seen(await found.engine.load_figures()):
        if time.monotonic() > deadline:
            raise Unavailable(f"not within {TURN_S:.0f} s: {what}")
        await asyncio.sleep(LOOK_S)


async def compare(found: Rig, seconds: float, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Turns of worker and bare loop; the median of the ratios of neighbours."""
    through: list[tuple[float, float]] = []
    direct: list[tuple[float, float]] = []
    levels: list[int] = []
    async with worker(found) as (made, stub):
        await asyncio.sleep(WARM_S)
        stub.open = False
        await until(found, lambda load: not load.running + load.waiting, "the engine is idle")
        for number in range(rounds):
            if number % 2:
                direct.append(await turn(found, seconds, bare(found, BARE), lambda: BARE))
            through.append(await turn(found, seconds, fed(stub), lambda: made.target))
            levels.append(made.target)
            if not number % 2:
                direct.append(await turn(found, seconds, bare(found, BARE), lambda: BARE))
            (speed, own), (least, others) = through[-1], direct[-1]
            say(
                f"turn {number + 1}: agent {speed:.0f}/s with {levels[-1]} under way, bare loop {least:.0f}/s, "
                f"ratio {speed / least:.3f}; cores taken {own:.2f} and {others:.2f}"
            )
        handed_in = stub.handed_in()
    ratios = sorted(a / b for (a, _), (b, _) in zip(through, direct, strict=True))
    return {
        "tokens_vs_engine": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "agent_tokens_per_s": round(statistics.median(speed for speed, _ in through), 1),
        "engine_tokens_per_s": round(statistics.median(speed for speed, _ in direct), 1),
        "under_way": levels,
        "handed_in_tokens": handed_in,
    }


async def swaps(found: Rig, count: int) -> dict[str, Any]:
    """Installs under load, each beside a load of the same file by the same server and nothing else."""
    whole, load = [], []
    payload = str(found.model.snapshot.payload_path)
    async with worker(found):
        await asyncio.sleep(WARM_S)
        for _ in range(count):
            began = time.perf_counter()
            await found.host.install(found.model.snapshot)
            whole.append(time.perf_counter() - began)
            await asyncio.sleep(0.5)
            await found.life.http.pause("keep")
            began = time.perf_counter()
            await found.life.http.load_weights(payload)
            load.append(time.perf_counter() - began)
            await found.life.http.resume()
            await asyncio.sleep(0.5)
    return {
        "swap_overhead_s": round(statistics.median(a - b for a, b in zip(whole, load, strict=True)), 4),
        "swap_s": round(statistics.median(whole), 4),
        "swap_longest_s": round(max(whole), 4),
        "load_s": round(statistics.median(load), 4),
    }
