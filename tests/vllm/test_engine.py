"""One vLLM on the CPU: what it samples, what a swap does to it, and what becomes of it when something is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from app.protocol.errors import BadInput, IntegrityError, Unavailable
from app.rollout_agent.engines.base import Completion, EngineDied, Tainted
from app.rollout_agent.engines.vllm import VllmEngine
from tests.unit.rollout_agent.tiny import EOS
from tests.vllm.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
AGREES = 0.02


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(world: World) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(world.options())
    await engine.load(world.folder)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(world: World, loaded: VllmEngine) -> VllmEngine:
    """Alive and with version 0, whatever the test before did to it."""
    if loaded.version is None:
        await loaded.load(world.folder)
    await install(loaded, world, 0)
    return loaded


async def install(engine: VllmEngine, world: World, version: int, **how: int) -> float:
    snapshot = world.publish(version, **how)
    began = time.monotonic()
    await engine.install(snapshot.payload_path, snapshot.manifest, version)
    return time.monotonic() - began


def sample(engine: VllmEngine, i: int, max_tokens: int = 40, temperature: float = 1.0) -> asyncio.Task[Completion]:
    return asyncio.create_task(
        engine.sample(prompt(i), seed=i, max_tokens=max_tokens, temperature=temperature)  # type: ignore[arg-type]
    )


def prompt(i: int) -> list[int]:
    return [10, 20, 30 + i % 200]


def group_of(pid: int) -> list[int]:
    """Processes of a group, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def victim_of(host: int, which: str) -> int:
    """The server under a host; or the engine's core, the server's child that does not count shared memory."""
    (server,) = children(host)
    if which == "server":
        return server
    return next(pid for pid in children(server) if "resource_tracker" not in command_of(pid))


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Crowd:
    """More requests than it can run at once, a new one for each that ended: whenever one looks, some are under way."""

    made: list[tuple[int, Completion]] = field(default_factory=list)
    errors: list[Unavailable] = field(default_factory=list)
    asked: int = 0
    over: bool = False

    @property
    def cut(self) -> list[tuple[int, Completion]]:
        """Those that came back before they were finished."""
        return [(i, c) for i, c in self.made if c.finish_reason == "abort"]

    async def one_after_the_other(self, engine: VllmEngine) -> None:
        while not self.over:
            self.asked += 1
            i = self.asked
            try:
                self.made.append((i, await sample(engine, i, max_tokens=230)))
            except Unavailable as error:
                self.errors.append(error)
                return


@asynccontextmanager
async def crowd(engine: VllmEngine) -> AsyncIterator[Crowd]:
    """At the end all of them are answered, or have failed."""
    found = Crowd()
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        for _ in range(40):
            tasks.create_task(found.one_after_the_other(engine))
        while True:
            if (await engine.load_figures()).running >= 8:
                break
            await asyncio.sleep(0.02)
        try:
            yield found
        finally:
            found.over = True


async def until_none(engine: VllmEngine, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while engine.version is not None:
        assert time.monotonic() < deadline, "the end of the engine was not noticed"
        await asyncio.sleep(0.1)


async def test_logprobs_are_those_of_transformers(engine: VllmEngine, world: World) -> None:
    made = await asyncio.gather(*[sample(engine, i) for i in range(24)])
    assert max(world.off(prompt(i), c) for i, c in enumerate(made)) <= AGREES
    for completion in made:
        assert [s.version for s in completion.spans] == [0]
        ended = completion.finish_reason == "stop"
        assert ended == (completion.token_ids[-1] == EOS)
        assert EOS not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == 40
    assert {c.finish_reason for c in made} == {"stop", "length"}


async def test_the_seed_decides_the_sample(engine: VllmEngine) -> None:
    first, again, other = await asyncio.gather(
        engine.sample([10, 20, 30], seed=7, max_tokens=20, temperature=1.0),
        engine.sample([10, 20, 30], seed=7, max_tokens=20, temperature=1.0),
        engine.sample([10, 20, 30], seed=8, max_tokens=20, temperature=1.0),
    )
    assert first.token_ids == again.token_ids != other.token_ids


async def test_next_to_no_temperature_the_likeliest_tokens_come_whatever_the_seed(engine: VllmEngine) -> None:
    drawn = await asyncio.gather(
        *[engine.sample([10, 20, 30], seed=n, max_tokens=20, temperature=1e-6) for n in range(3)]
    )
    assert len({tuple(c.token_ids) for c in drawn}) == 1
    assert all(not any(c.logprobs) for c in drawn)
    certain = await engine.score([10, 20, 30], drawn[0].token_ids, 1.0)
    by_chance = await engine.sample([10, 20, 30], seed=1, max_tokens=20, temperature=1.0)
    assert sum(certain) / len(certain) > sum(by_chance.logprobs) / len(by_chance.logprobs)


async def test_at_another_temperature_logprobs_are_of_what_was_sampled(engine: VllmEngine, world: World) -> None:
    made = await asyncio.gather(*[sample(engine, i, temperature=0.6) for i in range(8)])
    assert max(world.off(prompt(i), c, 0.6) for i, c in enumerate(made)) <= AGREES
    with pytest.raises(BadInput, match="temperature 1 only"):
        await engine.score([10], [20], 0.6)


async def test_scoring_gives_what_sampling_gave(engine: VllmEngine, world: World) -> None:
    made = await sample(engine, 3)
    assert await engine.score(prompt(3), made.token_ids, 1.0) == pytest.approx(made.logprobs, abs=AGREES)


async def test_what_no_model_can_take_is_refused(engine: VllmEngine) -> None:
    for ids, tokens, temperature in (
        ([], 4, 1.0),
        ([10, 999], 4, 1.0),
        ([10], 0, 1.0),
        ([10], 4, 0.005),
        ([9] * 300, 4, 1.0),
    ):
        with pytest.raises(BadInput):
            await engine.sample(ids, seed=1, max_tokens=tokens, temperature=temperature)
    assert await engine.healthy(20.0)


async def test_nobody_without_the_key_reaches_it(engine: VllmEngine) -> None:
    assert engine.base_url is not None
    async with httpx.AsyncClient(base_url=engine.base_url, trust_env=False, timeout=10) as stranger:
        for method, path in (("POST", "/pause"), ("POST", "/collective_rpc"), ("GET", "/metrics"), ("GET", "/health")):
            assert (await stranger.request(method, path)).status_code == 401


async def test_figures_and_abort(engine: VllmEngine, world: World) -> None:
    async with crowd(engine) as under_way:
        assert (await engine.load_figures()).running <= 16
        async with asyncio.timeout(30):
            # A request that ends by itself on the way there was not cut.
            while not any(c.token_ids for _, c in under_way.cut):
                await engine.abort()
    assert all(len(c.token_ids) == len(c.logprobs) < 230 for _, c in under_way.cut)
    assert max(world.off(prompt(i), c) for i, c in under_way.cut if c.token_ids) <= AGREES
    assert (await sample(engine, 1)).finish_reason in ("stop", "length"), "new ones are taken after"


async def test_fifty_swaps_under_load(engine: VllmEngine, world: World) -> None:
    made: list[tuple[int, Completion]] = []
    stop = asyncio.Event()

    async def keep_asking(first: int) -> None:
        i = first
        while not stop.is_set():
            made.append((i, await sample(engine, i, max_tokens=200)))
            i += 8

    asking = [asyncio.create_task(keep_asking(i)) for i in range(8)]
    took = [await install(engine, world, version) for version in range(1, 51)]
    stop.set()
    await asyncio.gather(*asking)
    worst = max(world.off(prompt(i), c) for i, c in made)
    spanning = sum(len(c.spans) > 1 for _, c in made)
    print(f"\n{len(made)} completions, {spanning} of several versions, worst {worst:.4f} nats")
    print(f"swap s: median {sorted(took)[25]:.3f}, worst {max(took):.3f}")
    assert engine.version == 50
    assert spanning > 10
    assert worst <= AGREES
    for _, completion in made:
        versions = [s.version for s in completion.spans]
        assert versions == sorted(set(versions))


async def test_a_quantised_version_is_what_its_bytes_stand_for(engine: VllmEngine, world: World) -> None:
    snapshot = world.publish(1, quantise="int8", probe_of=-1)
    await engine.install(snapshot.payload_path, snapshot.manifest, 1)
    assert engine.quantisation == "int8"
    assert not (world.root / "vllm" / "restored.safetensors").exists()
    made = await sample(engine, 1)
    assert world.off(prompt(1), made) < 0.3, "near the learner's own"


async def test_a_truncated_snapshot_never_reaches_the_engine(engine: VllmEngine, world: World, tmp_path: Path) -> None:
    snapshot = world.publish(1)
    data = snapshot.payload_path.read_bytes()
    for broken in (data[:-100], data[:-1] + b"\xff"):
        (tmp_path / "p").write_bytes(broken)
        with pytest.raises(IntegrityError) as caught:
            await engine.install(tmp_path / "p", snapshot.manifest, 1)
        assert not isinstance(caught.value, Tainted)
    assert engine.version == 0
    assert world.off(prompt(1), await sample(engine, 1)) <= AGREES


async def test_resubmit_gives_partials_that_continue(world: World, engine: VllmEngine) -> None:
    snapshot = world.publish(1)
    engine._options = replace(engine._options, on_swap="resubmit")
    try:
        async with crowd(engine) as under_way, asyncio.timeout(60):
            while not any(c.token_ids for _, c in under_way.cut):
                await engine.install(snapshot.payload_path, snapshot.manifest, 1)
    finally:
        engine._options = replace(engine._options, on_swap="continue")
    for i, c in under_way.cut[:12]:
        assert len(c.spans) == bool(c.token_ids), "nothing goes on under another version"
        rest = await engine.sample([*prompt(i), *c.token_ids], seed=i, max_tokens=20, temperature=1.0)
        assert [s.version for s in rest.spans] == [1]
        assert world.off([*prompt(i), *c.token_ids], rest) <= AGREES


async def test_weights_that_are_not_the_learners_end_the_engine(engine: VllmEngine, world: World) -> None:
    snapshot = world.publish(2, probe_of=3)
    async with crowd(engine) as under_way:
        with pytest.raises(Tainted, match="nats off"):
            await engine.install(snapshot.payload_path, snapshot.manifest, 2)
        assert engine.version is None
        assert engine.pid is None
    assert under_way.cut, "partials are saved"
    for i, made in under_way.made:
        assert {s.version for s in made.spans} <= {0}, "nothing of the version that was none is given out"
        assert not made.token_ids or world.off(prompt(i), made) <= AGREES
    with pytest.raises(Unavailable):
        await sample(engine, 1)
    await engine.load(world.folder)
    await install(engine, world, 0)
    assert world.off(prompt(1), await sample(engine, 1)) <= AGREES


async def test_a_payload_that_lacks_a_layer_is_tainted_and_mended(
    engine: VllmEngine, world: World, tmp_path: Path
) -> None:
    snapshot = world.publish(1, probe_of=-1)
    state = {n: t for n, t in load_file(snapshot.payload_path).items() if ".layers.1." not in n}
    save_file(state, tmp_path / "p")
    # Past what is checked before, which would never let it come so far.
    with pytest.raises(Tainted, match=r"layers\.1"):
        await engine._replace(engine._living(), tmp_path / "p", snapshot.manifest, 1)
    assert engine.version is None
    await engine.load(world.folder)
    await engine.install(snapshot.payload_path, snapshot.manifest, 1)
    assert world.off(prompt(1), await sample(engine, 1)) <= AGREES


@pytest.mark.parametrize("victim", ["core", "server"])
async def test_a_killed_engine_is_noticed_and_comes_back(engine: VllmEngine, world: World, victim: str) -> None:
    assert engine.pid is not None
    host = engine.pid
    async with crowd(engine) as under_way:
        os.kill(victim_of(host, victim), signal.SIGKILL)
        await until_none(engine)
    assert any(isinstance(error, EngineDied) for error in under_way.errors)
    with pytest.raises(Unavailable):
        await sample(engine, 1)
    assert not await engine.healthy(2.0)
    await engine.load(world.folder)
    assert group_of(host) == [], "nothing of the old one is left"
    await install(engine, world, 0)
    assert world.off(prompt(1), await sample(engine, 1)) <= AGREES


async def test_close_leaves_no_process(world: World, engine: VllmEngine) -> None:
    assert engine.pid is not None
    pid = engine.pid
    assert len(group_of(pid)) >= 3
    await engine.close()
    assert group_of(pid) == []
    assert engine.version is None
