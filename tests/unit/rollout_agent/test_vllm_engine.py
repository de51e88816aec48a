"""The vLLM engine against a stand-in server: the protocol of a swap, and what becomes of the engine when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.protocol.errors import BadInput, IntegrityError, Unavailable
from app.rollout_agent.engines import vllm_http
from app.rollout_agent.engines.base import Completion, EngineDied, Span, Tainted
from app.rollout_agent.engines.vllm import VllmEngine
from app.rollout_agent.engines.vllm_command import VllmOptions
from app.snapshots.manifest import Probe, new_key
from app.snapshots.store import Snapshot, SnapshotStore
from tests.unit.rollout_agent.fake_vllm import Plan, interpreter
from tests.unit.rollout_agent.tiny import make_model, new_store, write_model_files

IDS = [5, 6, 7, 8]


class Setup:
    """A model, its snapshots, and an engine whose server is the stand-in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = write_model_files(root / "model")
        self.state = make_model(self.model, 0).state_dict()
        self.key: Ed25519PrivateKey = new_key()
        self.store: SnapshotStore = new_store(root / "snapshots", self.key)
        self.plan = Plan(root)
        self.python = interpreter(root / "python")

    def engine(self, **changes: Any) -> VllmEngine:
        options: dict[str, Any] = {"python": self.python, "device": "cpu", "work_dir": self.root / "vllm"}
        return VllmEngine(VllmOptions(**{**options, "start_timeout_s": 30.0, **changes}), self.plan.env)

    def publish(self, version: int, logprobs: list[float] | None = None) -> Snapshot:
        probe = None if logprobs is None else Probe(token_ids=IDS, logprobs=logprobs)
        published = self.store.publish(
            self.state, version=version, key=self.key, deltas=False, probe=None if probe is None else lambda _: probe
        )
        return published.snapshot

    async def install(self, engine: VllmEngine, version: int, logprobs: list[float] | None = None) -> None:
        snapshot = self.publish(version, logprobs)
        await engine.install(snapshot.payload_path, snapshot.manifest, version)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.fixture
async def engine(setup: Setup) -> AsyncIterator[VllmEngine]:
    made = setup.engine()
    await made.load(setup.model)
    yield made
    await made.close()


def sample(engine: VllmEngine, max_tokens: int = 5) -> asyncio.Task[Completion]:
    async def ask() -> Completion:
        return await engine.sample([10, 20], seed=3, max_tokens=max_tokens, temperature=1.0)

    return asyncio.create_task(ask())


async def running(engine: VllmEngine, n: int) -> None:
    async with asyncio.timeout(10):
        while (await engine.load_figures()).running < n:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_version_goes_in_by_the_protocol_and_samples_carry_it(setup: Setup, engine: VllmEngine) -> None:
    assert engine.version is None
    with pytest.raises(Unavailable, match="no policy version"):
        await sample(engine)
    await setup.install(engine, 4, [-0.25, -0.25, -0.25])
    assert engine.version == 4
    order = setup.plan.order()[1:]
    assert order[:3] == ["/pause", "/collective_rpc", "/update_weight_version"]
    assert sorted(order[3:]) == ["/inference/v1/generate", "/resume"], "the probe may be there before all goes on"
    assert setup.plan.calls("/pause") == [{"mode": "keep", "clear_cache": "true"}]
    made = await sample(engine)
    assert (len(made.token_ids), made.logprobs, made.finish_reason) == (5, [-0.5] * 5, "length")
    assert list(made.spans) == [Span(4, 0)]
    asked = setup.plan.calls("/inference/v1/generate")[-1]
    assert asked["cache_salt"] == "4"
    assert asked["sampling_params"]["stop_token_ids"] == [2]
    assert asked["sampling_params"]["seed"] == 3
    assert await engine.score([10, 20], [30, 40, 50], 1.0) == [-0.25] * 3
    assert (await engine.load_figures()).waiting == 2
    assert await engine.healthy(5.0)


async def test_what_runs_goes_on_under_the_new_version_or_comes_back(setup: Setup) -> None:
    for on_swap, finish, versions in (("continue", "length", [1, 2]), ("resubmit", "abort", [1])):
        engine = setup.engine(on_swap=on_swap)
        try:
            await engine.load(setup.model)
            await setup.install(engine, 1)
            setup.plan.set(token_s=0.02)
            task = sample(engine, 60)
            await running(engine, 1)
            await asyncio.sleep(0.1)
            await setup.install(engine, 2)
            setup.plan.set()
            made = await task
            assert made.finish_reason == finish
            assert [s.version for s in made.spans] == versions
        finally:
            await engine.close()


async def test_each_copy_of_the_model_is_probed(setup: Setup) -> None:
    engine, said = setup.engine(gpus=2, tensor_parallel=1), [-0.25, -0.25, -0.25]
    try:
        await engine.load(setup.model)
        assert {call["copy"] for call in setup.plan.calls("/inference/v1/generate")} == {"0", "1"}
        setup.plan.set(off={"0": 0.01, "1": 0.02})
        await setup.install(engine, 1, said)
        await sample(engine)
        assert "copy" not in setup.plan.calls("/inference/v1/generate")[-1], "the server shares samples out"
        setup.plan.set(off={"1": 0.3})
        with pytest.raises(Tainted, match=r"copies 0 and 1 of the engine's model are 0\.300 nats apart"):
            await setup.install(engine, 2, said)
        assert engine.pid is None
    finally:
        await engine.close()


async def test_an_engine_of_which_one_copy_makes_no_token_is_not_healthy(setup: Setup) -> None:
    engine = setup.engine(extra_args=("--data-parallel-size=2",))
    try:
        await engine.load(setup.model)
        assert await engine.healthy(5.0)
        setup.plan.set(stuck="1")
        assert not await engine.healthy(0.5)
    finally:
        await engine.close()


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"/pause": 500}, "answers 500 to /pause"),
    ({"/collective_rpc": 500}, "answers 500 to /collective_rpc"),
    ({"/collective_rpc": 400}, "answers 400 to /collective_rpc"),
    ({"/collective_rpc": "hang"}, "does not answer /collective_rpc"),
    ({"/collective_rpc": "die"}, "does not answer /collective_rpc.*; the engine died: .*no memory is left"),
    ({"/inference/v1/generate": "die"}, "does not answer /inference.*; the engine died: .*no memory is left"),
    ({"missing": ["model.layers.1.mlp.gate_up_proj.weight"]}, "layers.1.mlp"),
    ({"read": 17}, "read 17 tensors of"),
    ({"/update_weight_version": 500}, "answers 500 to /update_weight_version"),
    ({"/resume": 500}, "answers 500 to /resume"),
    ({"/inference/v1/generate": 500}, "answers 500 to /inference"),
]


@pytest.mark.parametrize(("fault", "says"), FAULTS)
async def test_whatever_fails_in_a_swap_ends_the_engine(
    setup: Setup, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(vllm_http, "LOAD_S", 0.5)
    await setup.install(engine, 1)
    pid = engine.pid
    assert pid is not None
    setup.plan.set(**fault)
    with pytest.raises(Tainted, match=says):
        await setup.install(engine, 2)
    assert engine.version is None
    assert engine.pid is None
    assert gone(pid)
    with pytest.raises(Unavailable):
        await sample(engine)


async def test_a_tainted_engine_is_mended_by_loading_it_again(setup: Setup, engine: VllmEngine) -> None:
    setup.plan.set(missing=["model.norm.weight"])
    with pytest.raises(Tainted, match=r"model\.norm"):
        await setup.install(engine, 2)
    setup.plan.set()
    await engine.load(setup.model)
    await setup.install(engine, 2)
    assert list((await sample(engine)).spans) == [Span(2, 0)]


async def test_of_a_version_that_was_none_nothing_is_given_out(setup: Setup, engine: VllmEngine) -> None:
    await setup.install(engine, 1)
    setup.plan.set(token_s=0.02)
    task = sample(engine, 400)
    await running(engine, 1)
    await asyncio.sleep(0.2)
    with pytest.raises(Tainted, match=r"0\.750 nats off"):
        await setup.install(engine, 2, [-1.0, -1.0, -1.0])
    made = await task
    assert made.finish_reason == "abort"
    assert 0 < len(made.token_ids) == len(made.logprobs) < 400
    assert list(made.spans) == [Span(1, 0)], "the part before is sound and not lost"


async def test_a_swap_that_is_cancelled_leaves_no_engine_in_doubt(setup: Setup, engine: VllmEngine) -> None:
    await setup.install(engine, 1)
    pid = engine.pid
    assert pid is not None
    setup.plan.set(**{"/collective_rpc": "hang"})
    task = asyncio.create_task(setup.install(engine, 2))
    async with asyncio.timeout(10):
        while len(setup.plan.calls("/collective_rpc")) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.version is None
    assert gone(pid)


async def test_a_snapshot_that_does_not_fit_never_reaches_the_engine(setup: Setup, engine: VllmEngine) -> None:
    await setup.install(engine, 1)
    before = setup.plan.order()
    snapshot = setup.publish(2)
    data = snapshot.payload_path.read_bytes()
    broken = setup.root / "broken"
    for content in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data[:9] + b"x" + data[10:], b""):
        broken.write_bytes(content)
        with pytest.raises(IntegrityError) as caught:
            await engine.install(broken, snapshot.manifest, 2)
        assert not isinstance(caught.value, Tainted)
    other = {n: t for n, t in setup.state.items() if "layers.1" not in n}
    lacking = setup.store.publish_full(other, version=3, key=setup.key)
    with pytest.raises(IntegrityError, match="missing"):
        await engine.install(lacking.payload_path, lacking.manifest, 3)
    assert engine.version == 1
    assert setup.plan.order() == before


async def test_a_quantised_version_is_restored_aside(
    setup: Setup, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.snapshots.quantise.LEAST_ELEMENTS", 64)
    snapshot = setup.store.publish(setup.state, version=1, key=setup.key, deltas=False, quantise="int8").snapshot
    await engine.install(snapshot.payload_path, snapshot.manifest, 1)
    assert engine.quantisation == "int8"
    loaded = setup.plan.calls("/collective_rpc")[0]["kwargs"]["path"]
    assert loaded == str(setup.root / "vllm" / "restored.safetensors")
    assert "restored.safetensors" not in os.listdir(setup.root / "vllm")


async def test_a_killed_server_is_noticed_at_once(setup: Setup, engine: VllmEngine) -> None:
    await setup.install(engine, 1)
    setup.plan.set(token_s=0.02)
    task = sample(engine, 400)
    await running(engine, 1)
    assert engine.pid is not None
    host = engine.pid
    (server,) = children(host)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await task
    async with asyncio.timeout(5):
        while engine.version is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not await engine.healthy(1.0)
    assert gone(host)


async def test_a_server_whose_host_is_killed_does_not_live_on(setup: Setup, engine: VllmEngine) -> None:
    await setup.install(engine, 1)
    assert engine.pid is not None
    (server,) = children(engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        while engine.version is not None or not gone(server):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stuck_engine_is_not_healthy_and_a_full_one_is(setup: Setup, engine: VllmEngine) -> None:
    await setup.install(engine, 1)
    setup.plan.set(**{"/inference/v1/generate": "hang"})
    assert not await engine.healthy(0.3)
    setup.plan.set(token_s=0.02)
    task = sample(engine, 100)
    await running(engine, 1)
    setup.plan.set(token_s=0.02, **{"/inference/v1/generate": "hang"})
    assert await engine.healthy(0.3), "its probe has to wait, but tokens come out"
    await engine.abort()
    assert (await task).finish_reason == "abort"


async def test_nobody_else_can_drive_it(setup: Setup, engine: VllmEngine) -> None:
    assert engine.base_url is not None
    async with httpx.AsyncClient(base_url=engine.base_url, trust_env=False, timeout=5) as stranger:
        for path in ("/health", "/pause", "/collective_rpc", "/v1/models", "/anything"):
            for headers in ({}, {"Authorization": "Bearer guess"}):
                assert (await stranger.post(path, headers=headers)).status_code == 401


async def test_a_start_that_fails_says_what_the_engine_said(setup: Setup) -> None:
    setup.plan.set(start="fail")
    with pytest.raises(Unavailable, match="no room for the key/value cache"):
        await setup.engine().load(setup.model)
    setup.plan.set(**{"/health": "hang"})
    engine = setup.engine(start_timeout_s=3.0)
    with pytest.raises(Unavailable, match="did not come up in 3 s"):
        await engine.load(setup.model)
    assert engine.pid is None
    setup.plan.set(without=["/collective_rpc"])
    with pytest.raises(BadInput, match="has no /collective_rpc"):
        await setup.engine().load(setup.model)


async def test_a_vllm_that_is_too_old_or_not_there_is_refused_before_it_starts(setup: Setup, tmp_path: Path) -> None:
    old = interpreter(tmp_path / "old", version="0.21.1")
    with pytest.raises(BadInput, match=r"vLLM 0\.21\.1 lacks spans"):
        await setup.engine(python=old).load(setup.model)
    with pytest.raises(BadInput, match="has no vLLM"):
        await setup.engine(python=sys.executable).load(setup.model)
    with pytest.raises(BadInput, match="ECHO2_VLLM_PYTHON"):
        await setup.engine(python=str(tmp_path / "none")).load(setup.model)
    assert setup.plan.order() == []


async def test_close_ends_everything(setup: Setup, engine: VllmEngine) -> None:
    assert engine.pid is not None
    pids = [engine.pid, *children(engine.pid)]
    assert len(pids) == 2
    await engine.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(Unavailable):
        await engine.load_figures()


_AGENT = """
import asyncio, sys
from pathlib import Path
from app.rollout_agent.engines.vllm import VllmEngine
from app.rollout_agent.engines.vllm_command import VllmOptions

async def main():
    engine = VllmEngine(VllmOptions(python=sys.argv[1], device="cpu", work_dir=Path(sys.argv[3])))
    await engine.load(Path(sys.argv[2]))
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_agent(setup: Setup) -> None:
    command = [sys.executable, "-c", _AGENT, setup.python, str(setup.model), str(setup.root / "vllm")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=setup.plan.env) as agent:
        assert agent.stdout is not None
        host = int(agent.stdout.readline())
        pids = [host, *children(host)]
        agent.kill()
        deadline = time.monotonic() + 15
        while not all(gone(pid) for pid in pids):
            assert time.monotonic() < deadline, "the engine lives on"
            time.sleep(0.05)


def test_the_models_layout_is_that_of_its_snapshots(setup: Setup) -> None:
    from app.rollout_agent.engines.blueprint import read_blueprint

    snapshot = setup.publish(1)
    layout = read_blueprint(setup.model).layout
    assert list(layout) == [t.name for t in snapshot.manifest.tensors]
    assert all(list(layout[t.name]) == t.shape for t in snapshot.manifest.tensors)
    assert torch.get_num_threads() == 1
