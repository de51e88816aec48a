"""One engine over two workers: each holds its part of every layer, and a version goes into both or the engine ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app.protocol.errors import Unavailable
from app.rollout_agent.engines.vllm import VllmEngine
from tests.vllm.test_engine import AGREES, group_of, install, prompt, sample, until_none
from tests.vllm.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(world: World) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(world.options(gpus=2))
    await engine.load(world.folder)
    yield engine
    await engine.close()


def workers(leader: int) -> list[int]:
    """The processes that hold the model's parts."""
    found = []
    for pid in group_of(leader):
        with open(f"/proc/{pid}/comm") as file:
            if "Worker" in file.read():
                found.append(pid)
    return found


async def test_versions_go_into_both_parts_while_it_samples(engine: VllmEngine, world: World) -> None:
    assert engine.pid is not None
    assert len(workers(engine.pid)) == 2
    await install(engine, world, 0)
    asked = [sample(engine, i, max_tokens=200) for i in range(12)]
    for version in range(1, 6):
        await install(engine, world, version)
    made = await asyncio.gather(*asked)
    assert max(world.off(prompt(i), c) for i, c in enumerate(made)) <= AGREES
    made = await asyncio.gather(*[sample(engine, i) for i in range(8)])
    assert {s.version for c in made for s in c.spans} == {5}
    assert max(world.off(prompt(i), c) for i, c in enumerate(made)) <= AGREES


async def test_a_dead_worker_ends_the_engine(engine: VllmEngine) -> None:
    assert engine.pid is not None
    leader = engine.pid
    os.kill(workers(leader)[1], signal.SIGKILL)
    with pytest.raises(Unavailable):
        await sample(engine, 1)
    await until_none(engine)
    await engine.close()
    assert group_of(leader) == [], "nothing of it is left"
