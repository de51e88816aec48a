"""`echo2 bench-node`: a machine measured by hand, with the agent's own engines and no control service.

Invariant: what is printed was measured now, on this machine; what was not measured is null and says why. Every sample
is held against the rules of the self-test, so that nobody's speed is that of nonsense.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from app.protocol.errors import Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.startup import MachineFacts
from app.rollout_agent import selftest
from app.rollout_agent.bench_model import BenchModel
from app.rollout_agent.config import AgentSettings
from app.rollout_agent.engines.base import Engine, StreamEngine
from app.rollout_agent.hosting import BatchHost
from app.rollout_agent.room import Unfit, gpus_used, split_in
from app.rollout_agent.working import make_host

LINK_S = 10.0
"""A downlink is measured for at most so long; an uplink for as long as UPLOAD_BYTES take."""
UPLOAD_BYTES = 64 * 1024 * 1024
BLOCK = bytes(256 * 1024)
LINK_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
ROUNDS = 2
"""Each concurrency is measured so often; the faster round counts, since the first one may pay for what is set up."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per second with so many completions at once."""

    concurrency: int
    tokens: int
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One machine. `concurrency` and `tokens_per_s` are those of the fastest row: what priors are made of."""

    gpu_name: str
    num_gpus: int
    engine: str
    model: str
    parameters: int
    max_tokens: int
    concurrency: int
    tokens_per_s: float
    rows: Sequence[Row]
    load_s: float
    swap_s: float
    snapshot_bytes: int
    down_mbps: float | None = None
    up_mbps: float | None = None
    notes: Sequence[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def measure(
    engine: Engine | StreamEngine, model: BenchModel, *, concurrencies: Sequence[int], max_tokens: int, name: str,
    title: str, gpu_name: str, facts: MachineFacts, settings: AgentSettings | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:  # fmt: skip
    """Load, install twice, generate. `name`: the engine's; `title`: the model's; `settings`: those that the engine was
    made of. Raises Unfit for unsound samples, and what the engine raises."""
    with ThreadPoolExecutor(1, "engine") as pool:
        host = make_host(engine, model.folder, pool)
        try:
            began = clock()
            await host.load()
            load_s = clock() - began
            await host.install(model.snapshot)
            began = clock()
            await host.install(model.snapshot)
            swap_s = clock() - began
            rows = [row async for row in _rows(engine, model, pool, concurrencies, max_tokens, clock)]
        finally:
            host.interrupt()
            await host.close()
    best = max(rows, key=lambda row: row.tokens_per_s)
    gpus = _gpus_used(host, facts, model.folder, settings)
    return Measured(
        gpu_name=gpu_name, num_gpus=gpus, engine=name, model=title, parameters=model.parameters,
        max_tokens=max_tokens, concurrency=best.concurrency, tokens_per_s=best.tokens_per_s, rows=rows, load_s=load_s,
        swap_s=swap_s, snapshot_bytes=model.snapshot.manifest.payload_bytes, facts=facts.model_dump(),
    )  # fmt: skip


def _gpus_used(host: object, facts: MachineFacts, folder: Path, settings: AgentSettings | None) -> int:
    """An engine that is called from a thread uses one GPU, one that is a process those that share the model."""
    return 1 if isinstance(host, BatchHost) else max(1, gpus_used(len(facts.gpus), split_in(folder), settings))


async def _rows(
    engine: Engine | StreamEngine, model: BenchModel, pool: ThreadPoolExecutor, concurrencies: Sequence[int],
    max_tokens: int, clock: Callable[[], float],
) -> AsyncIterator[Row]:  # fmt: skip
    sampling = SamplingSpec(max_tokens=max_tokens)
    sample = selftest.sampler(engine, pool, sampling)
    shape = replace(selftest.shape_for(model.folder, engine.tokenizer, max_tokens), max_tokens=max_tokens)
    for concurrency in concurrencies:
        best: Row | None = None
        for _ in range(ROUNDS):
            asked = replace(shape, samples=concurrency)
            began = clock()
            completions = await sample(asked)
            seconds = max(clock() - began, 1e-9)
            if wrong := selftest.fault(completions, asked):
                raise Unfit(f"the engine gave {wrong}")
            tokens = sum(len(completion.token_ids) for completion in completions)
            row = Row(concurrency, tokens, seconds, tokens / seconds)
            best = row if best is None or row.tokens_per_s > best.tokens_per_s else best
        assert best is not None
        yield best


async def with_links(measured: Measured, down_url: str | None, up_url: str | None) -> Measured:
    """The link rates too; without an address, or where it does not answer, a note instead."""
    notes, rates = list(measured.notes), {"down": None, "up": None}
    async with httpx.AsyncClient(timeout=LINK_TIMEOUT, follow_redirects=True) as http:
        for way, url, ask in (("down", down_url, down_mbps), ("up", up_url, up_mbps)):
            if url is None:
                notes.append(f"{way}link not measured: give --{way}-url")
                continue
            try:
                rates[way] = await ask(http, url)  # type: ignore[assignment]
            except Unavailable as error:
                notes.append(f"{way}link not measured: {error.detail}")
    return replace(measured, down_mbps=rates["down"], up_mbps=rates["up"], notes=notes)


async def down_mbps(http: httpx.AsyncClient, url: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Mbit/s of a GET, for a few seconds of it. Raises Unavailable."""
    size, began = 0, clock()
    try:
        async with http.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
            response.raise_for_status()
            async for part in response.aiter_raw():
                size += len(part)
                if clock() - began > LINK_S:
                    break
    except httpx.HTTPStatusError as error:
        raise Unavailable(f"the address answers HTTP {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"the address can't be read ({type(error).__name__})") from error
    return size * 8 / 1e6 / max(clock() - began, 1e-9)


async def up_mbps(http: httpx.AsyncClient, url: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Mbit/s of a PUT. Raises Unavailable."""
    began = clock()
    try:
        response = await http.put(url, content=_blocks(), headers={"Content-Length": str(UPLOAD_BYTES)})
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise Unavailable(f"the address answers HTTP {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"the address can't be written ({type(error).__name__})") from error
    return UPLOAD_BYTES * 8 / 1e6 / max(clock() - began, 1e-9)


async def _blocks() -> AsyncIterator[bytes]:
    for _ in range(UPLOAD_BYTES // len(BLOCK)):
        yield BLOCK
        await asyncio.sleep(0)


def short_name(driver_name: str) -> str:
    """A card's name as marketplaces have it: `NVIDIA GeForce RTX 4090` → `RTX 4090`."""
    return driver_name.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()
