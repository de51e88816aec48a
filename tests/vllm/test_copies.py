"""One server over two copies of the model (data parallelism): a version goes into both, and both sample.

vLLM gives out what the first copy's workers answer; of the others, what they raise.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors import safe_open
from safetensors.torch import save_file

from app.rollout_agent.engines.base import EngineDied, Tainted
from app.rollout_agent.engines.checksums import parameter
from app.rollout_agent.engines.vllm import VllmEngine
from app.rollout_agent.engines.vllm_answers import tokens_made
from app.rollout_agent.engines.vllm_http import EngineHttp
from tests.vllm.test_engine import AGREES, crowd, group_of, install, prompt, sample, until_none
from tests.vllm.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
COPIES = ("dp0", "dp1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(world: World) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(world.options(gpus=2, tensor_parallel=1))
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


def server(engine: VllmEngine) -> EngineHttp:
    assert engine._life is not None
    return engine._life.http


def cores(leader: int) -> list[int]:
    """The processes of the copies."""
    return [pid for pid in group_of(leader) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]


async def made_by_each(engine: VllmEngine) -> list[float]:
    """Tokens of the first copy, and of the second."""
    lines = (await server(engine).metrics()).splitlines()
    return [tokens_made("\n".join(line for line in lines if f'engine="{i}"' in line)) for i in range(2)]


async def held_by_each(engine: VllmEngine) -> dict[str, dict[str, str]]:
    """Copy → parameter → checksum."""
    found = defaultdict[str, dict[str, str]](dict)
    for key, sha in (await server(engine).checksums()).items():
        found[key.split(":")[0]][parameter(key)] = sha
    return found


async def test_versions_go_into_both_copies_while_both_sample(engine: VllmEngine, world: World) -> None:
    assert engine.pid is not None
    assert len(cores(engine.pid)) == 2
    before, held = await made_by_each(engine), await held_by_each(engine)
    assert set(held) == set(COPIES)
    async with crowd(engine) as under_way:
        for version in range(1, 6):
            await install(engine, world, version)
            now = await held_by_each(engine)
            assert now["dp0"] == now["dp1"] != held["dp1"]
            held = now
    assert not under_way.errors
    assert max(world.off(prompt(i), c) for i, c in under_way.made) <= AGREES
    assert any(len(c.spans) > 1 for _, c in under_way.made)
    made = await asyncio.gather(*[sample(engine, i) for i in range(8)])
    assert {s.version for c in made for s in c.spans} == {5}
    assert max(world.off(prompt(i), c) for i, c in enumerate(made)) <= AGREES
    one, two = (after - at for after, at in zip(await made_by_each(engine), before, strict=True))
    assert min(one, two) > 0.25 * (one + two), "the requests are shared out"


async def test_what_runs_in_both_copies_is_cut(engine: VllmEngine) -> None:
    async with crowd(engine) as under_way, asyncio.timeout(30):
        while len(under_way.cut) < 10:
            await engine.abort()
    assert not under_way.errors
    assert (await engine.load_figures()).running == 0


async def test_a_payload_that_lacks_a_layer_ends_the_engine(
    engine: VllmEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = world.publish(2)
    with safe_open(snapshot.payload_path, framework="pt", device="cpu") as file:
        names: Sequence[str] = [n for n in file.keys() if ".layers.1.mlp" not in n]  # noqa: SIM118
        save_file({n: file.get_tensor(n) for n in names}, world.root / "short", metadata=file.metadata())
    http, load_weights = server(engine), server(engine).load_weights
    monkeypatch.setattr(http, "load_weights", lambda _: load_weights(str(world.root / "short")))
    with pytest.raises(Tainted):
        await engine.install(snapshot.payload_path, snapshot.manifest, 2)
    assert engine.version is None
    assert engine.pid is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is in another environment")
async def test_a_copy_whose_account_nobody_sees_raises_what_is_amiss() -> None:
    from app.rollout_agent.engines.vllm_inside.echo2_engine_worker import account

    whole = {"read": 24, "missing": [], "short": []}
    assert [account(24, [], [], copy=copy) for copy in (0, 1)] == [whole, whole]
    assert account(24, ["a"], [], copy=0) == {**whole, "missing": ["a"]}
    for missing, short in ((["a"], []), ([], ["a"])):
        with pytest.raises(RuntimeError, match="copy 1 of the model is not all of this version: a"):
            account(24, missing, short, copy=1)


async def test_a_dead_copy_ends_the_engine(engine: VllmEngine) -> None:
    assert engine.pid is not None
    leader, under_way = engine.pid, [sample(engine, i, max_tokens=230) for i in range(8)]
    os.kill(cores(leader)[1], signal.SIGKILL)
    ended = await asyncio.gather(*under_way, return_exceptions=True)
    assert any(isinstance(error, EngineDied) for error in ended)
    await until_none(engine)
    await engine.close()
    assert group_of(leader) == [], "nothing of it is left"
