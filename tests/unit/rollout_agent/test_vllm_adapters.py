"""Versions that are adapters, in the vLLM engine against a stand-in server; and the paced engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.protocol.errors import BadInput, IntegrityError
from app.rollout_agent.config import load_settings
from app.rollout_agent.engines import vllm_adapters
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.engines.paced_stream import PacedStream
from app.rollout_agent.engines.registry import ENGINES, is_stream, make_engine
from app.rollout_agent.engines.vllm import VllmEngine
from app.rollout_agent.engines.vllm_command import MAX_LORAS, VllmOptions
from app.snapshots.manifest import ADAPTER_ASSET, Probe, new_key
from tests.unit.rollout_agent.fake_vllm import Plan, interpreter
from tests.unit.rollout_agent.tiny import adapter_asset, new_store, write_model_files

RANK = 2


class Setup:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = write_model_files(root / "model")
        described = {"r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
        (self.model / ADAPTER_ASSET).write_text(json.dumps(described))
        self.key = new_key()
        self.store = new_store(root / "snapshots", self.key)
        self.plan = Plan(root)
        options = VllmOptions(python=interpreter(root / "python"), device="cpu", work_dir=root / "vllm")
        self.engine = VllmEngine(options, self.plan.env)

    async def install(self, version: int, logprob: float = -0.25, *, described: bool = True) -> None:
        state = {}
        for layer in range(2):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            state[f"{name}.lora_A.weight"] = torch.full((RANK, 32), float(version))
            state[f"{name}.lora_B.weight"] = torch.full((32, RANK), float(version))
        probe = Probe(token_ids=[5, 6, 7], logprobs=[logprob] * 2)
        snapshot = self.store.publish(
            state, version=version, key=self.key, deltas=False, probe=lambda _: probe,
            assets=[adapter_asset(self.model)] if described else [],
        ).snapshot  # fmt: skip
        await self.engine.install(snapshot.payload_path, snapshot.manifest, version)

    def sample(self, max_tokens: int = 3) -> asyncio.Task[Completion]:
        async def ask() -> Completion:
            return await self.engine.sample([10], seed=1, max_tokens=max_tokens, temperature=1.0)

        return asyncio.create_task(ask())

    def folders(self) -> list[str]:
        return sorted(p.name for p in (self.root / "vllm" / "adapters").iterdir())


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    made = Setup(tmp_path)
    await made.engine.load(made.model)
    yield made
    await made.engine.close()


async def test_each_version_is_an_adapter_of_its_own_and_the_old_one_goes(setup: Setup) -> None:
    await setup.install(1)
    await setup.install(2)
    first, second = setup.plan.calls("/v1/load_lora_adapter")
    assert first["lora_name"] != second["lora_name"]
    assert setup.plan.calls("/v1/unload_lora_adapter") == [{"lora_name": first["lora_name"]}]
    assert setup.folders() == [second["lora_name"]]
    folder = Path(second["lora_path"])
    assert json.loads((folder / "adapter_config.json").read_bytes())["r"] == RANK
    assert (folder / "adapter_model.safetensors").is_file()
    made = await setup.sample()
    assert list(made.spans) == [Span(2, 0)]
    asked = setup.plan.calls("/inference/v1/generate")[-1]
    assert (asked["model"], asked["cache_salt"]) == (second["lora_name"], "2")
    assert "/pause" not in setup.plan.order(), "the weights that run are not touched"


async def test_what_an_earlier_server_left_of_its_adapters_goes_with_the_first_version_of_the_next(
    setup: Setup,
) -> None:
    """An adapter's folder holds its version's payload on the disk, and a machine of the user's own keeps its disk."""
    await setup.install(1)
    await setup.install(2)
    left = setup.folders()
    await setup.engine.load(setup.model)
    assert setup.folders() == left
    await setup.install(3)
    (told,) = setup.plan.calls("/v1/load_lora_adapter")[2:]
    assert setup.folders() == [told["lora_name"]]
    await setup.install(4)
    assert len(setup.folders()) == 1


async def test_what_runs_ends_under_its_own_adapter(setup: Setup) -> None:
    await setup.install(1)
    setup.plan.set(token_s=0.02)
    task = setup.sample(40)
    async with asyncio.timeout(10):
        while (await setup.engine.load_figures()).running < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await setup.install(2)
    assert len(setup.folders()) == 2, "it is still needed"
    made = await task
    assert (made.finish_reason, list(made.spans)) == ("length", [Span(1, 0)])
    await setup.install(3)
    assert len(setup.folders()) == 1


async def test_a_version_is_in_force_though_the_engine_does_not_cut_what_runs(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_adapters, "DRAIN_S", 0.3)
    setup.engine._options = replace(setup.engine._options, on_swap="resubmit")
    await setup.install(1)
    setup.plan.set(token_s=0.02, **{"/abort_requests": 200})  # and nothing else
    task = setup.sample(80)
    async with asyncio.timeout(10):
        while (await setup.engine.load_figures()).running < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await setup.install(2)
    assert setup.engine.version == 2
    assert list((await setup.sample()).spans) == [Span(2, 0)]
    made = await task
    assert (made.finish_reason, list(made.spans)) == ("length", [Span(1, 0)])
    await setup.install(3)
    assert len(setup.folders()) == 1


async def test_no_more_adapters_than_the_engine_holds(setup: Setup) -> None:
    setup.plan.set(token_s=0.05)
    tasks = []
    for version in range(1, MAX_LORAS + 2):
        await setup.install(version)
        tasks.append(setup.sample(400))
        async with asyncio.timeout(10):
            while (await setup.engine.load_figures()).running < min(version, MAX_LORAS):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    oldest = await tasks[0]
    assert (oldest.finish_reason, [s.version for s in oldest.spans]) == ("abort", [1])
    assert not tasks[1].done()
    await setup.engine.abort()
    assert {(await task).finish_reason for task in tasks} == {"abort"}


@pytest.mark.parametrize("fault", [{"/v1/load_lora_adapter": 500}, {"/v1/load_lora_adapter": 400}, {}])
async def test_an_adapter_that_is_not_the_learners_never_gets_into_force(setup: Setup, fault: dict[str, int]) -> None:
    await setup.install(1)
    setup.plan.set(**fault)
    with pytest.raises(IntegrityError):
        await setup.install(2, -3.0)
    setup.plan.set()
    assert setup.engine.version == 1
    assert list((await setup.sample()).spans) == [Span(1, 0)]
    assert len(setup.folders()) == 1


async def test_a_version_of_another_kind_is_refused_before_the_engine_sees_it(setup: Setup) -> None:
    with pytest.raises(IntegrityError, match="of the kind full"):
        await setup.install(1, described=False)
    assert setup.engine.version is None
    assert setup.plan.calls("/v1/load_lora_adapter") == []


def test_the_registry_makes_it_from_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"CONTROL_URL": "http://c:1", "JOIN_TOKEN": "t", "ENGINE": "vllm", "DEVICE": "cpu"}
    settings |= {"AGENT_DIR": str(tmp_path), "VLLM_ARGS": "--block-size 16 --seed '7'", "VLLM_ON_SWAP": "resubmit"}
    for name, value in settings.items():
        monkeypatch.setenv(f"ECHO2_{name}", value)
    engine = make_engine(load_settings())
    assert isinstance(engine, VllmEngine)
    assert is_stream(engine)
    assert engine._options.extra_args == ("--block-size", "16", "--seed", "7")
    assert engine._options.on_swap == "resubmit"
    assert engine._options.work_dir == tmp_path / "vllm"
    assert "vllm" in ENGINES
    monkeypatch.setenv("ECHO2_SIM_TOKENS_PER_S", "100")
    assert isinstance(make_engine(load_settings()), PacedStream)
    monkeypatch.setenv("ECHO2_VLLM_ARGS", "--x 'open")
    with pytest.raises(BadInput, match="ECHO2_VLLM_ARGS"):
        load_settings()


class Inner:
    """Samples five tokens at once."""

    finish = "length"

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        return Completion([1] * 5, [-1.0] * 5, self.finish)  # type: ignore[arg-type]


async def test_a_paced_engine_gives_out_no_more_than_its_rate() -> None:
    now, waits = 100.0, []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))

    inner = Inner()
    engine = PacedStream(inner, 10.0, clock=lambda: now, sleep=sleep)  # type: ignore[arg-type]
    for _ in range(3):
        await engine.sample([1], seed=1, max_tokens=5, temperature=1.0)
    assert waits == [0.5, 1.0, 1.5]
    now = 200.0
    await engine.sample([1], seed=1, max_tokens=5, temperature=1.0)
    assert waits[-1] == 0.5
    inner.finish = "abort"
    await engine.sample([1], seed=1, max_tokens=5, temperature=1.0)
    assert len(waits) == 4, "what was cut is given back at once"
