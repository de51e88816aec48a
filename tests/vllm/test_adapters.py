"""Versions that are adapters, in a real vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.protocol.errors import IntegrityError
from app.rollout_agent.engines.adapter import adapt, read_config
from app.rollout_agent.engines.base import Span
from app.rollout_agent.engines.vllm import VllmEngine
from app.snapshots.manifest import ADAPTER_ASSET, Probe
from app.snapshots.store import SnapshotStore
from tests.unit.rollout_agent.tiny import adapter_asset, make_model
from tests.vllm.world import PROBE_IDS, World

pytestmark = pytest.mark.timeout(400)
DESCRIBED = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapted(folder: Path, version: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The base model with an adapter that has learnt something, and the adapter."""
    model, config = make_model(folder, 0), read_config(folder)
    assert config is not None
    weights = adapt(model, config)
    generator = torch.Generator().manual_seed(version)
    for tensor in weights.values():
        tensor.data.copy_((0.3 * torch.randn(tensor.shape, generator=generator)).to(torch.bfloat16))
    return model.eval(), weights


def logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    with torch.inference_mode():
        table = torch.log_softmax(model(input_ids=torch.tensor([list(ids)])).logits[0], -1)
    return [float(table[i, token]) for i, token in enumerate(ids[1:])]


async def test_versions_are_adapters_and_samples_have_the_learners_logprobs(tmp_path: Path) -> None:
    world = World(tmp_path)
    make_model(world.folder, 0).save_pretrained(world.folder)
    (world.folder / ADAPTER_ASSET).write_text(json.dumps(DESCRIBED))
    engine = VllmEngine(world.options())
    try:
        await engine.load(world.folder)
        await _versions(engine, world, tmp_path)
    finally:
        await engine.close()


async def _versions(engine: VllmEngine, world: World, root: Path) -> None:
    store = world.new_store("adapters")
    for version in range(1, 7):
        model, weights = adapted(world.folder, version)
        await _install(engine, store, world, version, weights, logprobs(model, PROBE_IDS))
        prompts = [[10, 20, 30 + i] for i in range(6)]
        made = await asyncio.gather(*[engine.sample(p, seed=1, max_tokens=30, temperature=1.0) for p in prompts])
        for prompt, completion in zip(prompts, made, strict=True):
            wanted = logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
            assert completion.logprobs == pytest.approx(wanted, abs=0.02)
            assert list(completion.spans) == [Span(version, 0)]
    _, weights = adapted(world.folder, 7)
    other = logprobs(adapted(world.folder, 8)[0], PROBE_IDS)
    with pytest.raises(IntegrityError, match="nats off"):
        await _install(engine, store, world, 7, weights, other)
    assert engine.version == 6


async def _install(
    engine: VllmEngine,
    store: SnapshotStore,
    world: World,
    version: int,
    weights: dict[str, torch.Tensor],
    said: list[float],
) -> None:
    probe = Probe(token_ids=PROBE_IDS, logprobs=said)
    published = store.publish(
        weights, version=version, key=world.key, deltas=False, probe=lambda _: probe,
        assets=[adapter_asset(world.folder)],
    )  # fmt: skip
    await engine.install(published.snapshot.payload_path, published.snapshot.manifest, version)
