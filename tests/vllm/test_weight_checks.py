"""What vLLM's own checksums show of a swap, where no probe says anything of the numbers.

On a CPU vLLM keeps linear layers elsewhere than in their parameters, whose checksums then are those of nothing: what is
seen here are embeddings and norms. On GPUs the parameters are what is computed with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from app.rollout_agent.engines.base import Tainted
from app.rollout_agent.engines.vllm import VllmEngine
from app.snapshots.store import Snapshot
from tests.vllm.test_engine import AGREES, crowd, prompt, sample
from tests.vllm.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
NORM, EMBEDDING = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"


class Uneven(World):
    """Its norms differ from version to version as well, and its vocabulary is one that no engine pads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        config = Qwen3Config.from_pretrained(self.folder)
        config.vocab_size = 320
        config.save_pretrained(self.folder)

    def model(self, version: int) -> Any:
        model, generator = super().model(version), torch.Generator().manual_seed(version % 5)
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator).add(0.5).to(torch.bfloat16))
        return model

    def mixed(self, new: Snapshot, old: Snapshot, names: set[str]) -> Path:
        """The payload of `new`, but with the tensors of `old` that are named."""
        state, before = load_file(new.payload_path), load_file(old.payload_path)
        save_file({n: before[n] if n in names else t for n, t in state.items()}, self.root / "mixed")
        return self.root / "mixed"


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Uneven:
    made = Uneven(tmp_path_factory.mktemp("world"))
    made.gpus = request.param  # type: ignore[attr-defined]
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(world: Uneven) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(world.options(gpus=world.gpus))  # type: ignore[attr-defined]
    await engine.load(world.folder)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(world: Uneven, loaded: VllmEngine) -> VllmEngine:
    """Alive, whatever the test before did to it."""
    if loaded.pid is None:
        await loaded.load(world.folder)
    return loaded


@pytest.fixture(autouse=True)
def every_version_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things makes a look long, and long looks are taken now and then only."""
    monkeypatch.setattr("app.rollout_agent.engines.vllm_checks.CHEAP_S", 60.0)


async def install(engine: VllmEngine, snapshot: Snapshot) -> float:
    began = time.monotonic()
    await engine.install(snapshot.payload_path, snapshot.manifest, snapshot.version)
    return time.monotonic() - began


async def test_versions_that_went_in_pass(engine: VllmEngine, world: Uneven, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await install(engine, world.publish(0, probe_of=-1))
    told = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("checksums take"))
    assert "of 18 parameters 18 known by name" in told
    exact = 10 if world.gpus == 1 else 9  # type: ignore[attr-defined]
    assert f"{exact} exact, 8 kept elsewhere" in told, "two workers have half of the embedding each"
    async with crowd(engine):
        took = [await install(engine, world.publish(version, probe_of=-1)) for version in (1, 2, 2, 3, 7, 4)]
    assert engine._checks is not None
    assert engine.weights is not None
    assert engine.weights.version == 4
    assert engine.weights.engine.endswith(f", {world.gpus} workers")  # type: ignore[attr-defined]
    print(f"\n{told}\nchecksums {engine._checks._cost_s:.4f} s of swaps of {sorted(took)[len(took) // 2]:.3f} s")
    assert world.off(prompt(1), await sample(engine, 1)) <= AGREES
    quantised = world.publish(1, probe_of=-1, quantise="int8")
    await install(engine, quantised)
    assert engine.quantisation == "int8"


@pytest.mark.parametrize("lost", [{NORM}, {EMBEDDING}], ids=["a norm", "the embedding"])
async def test_a_layer_that_the_engine_did_not_take_is_found(
    engine: VllmEngine, world: Uneven, monkeypatch: pytest.MonkeyPatch, lost: set[str]
) -> None:
    old, new = world.publish(0, probe_of=-1), world.publish(1, probe_of=-1)
    await install(engine, old)
    assert engine._life is not None
    http = engine._life.http
    load_weights, mixed = http.load_weights, world.mixed(new, old, lost)
    # The engine counts all elements of all layers, and no log-prob is compared.
    monkeypatch.setattr(http, "load_weights", lambda _: load_weights(str(mixed)))
    with pytest.raises(Tainted, match=rf"checksums {lost.copy().pop()} .*1 in all"):
        await install(engine, new)
    assert engine.version is None
    assert engine.pid is None
