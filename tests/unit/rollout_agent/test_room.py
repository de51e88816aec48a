"""Refusing what can't fit, before it is fetched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.job import SamplingSpec
from app.protocol.node import AssetRef, Directives, JoinAnswer
from app.protocol.startup import GpuFacts, MachineFacts
from app.protocol.task_spec import TaskSpec
from app.rollout_agent.agent import Agent
from app.rollout_agent.client import NodeClient
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.vllm_command import Split
from app.rollout_agent.room import (
    Model,
    Unfit,
    check,
    check_job,
    disk_needed,
    disk_short,
    fetched_split,
    folder_bytes,
    gpus_used,
    memory_short,
    split_in,
)
from tests.unit.rollout_agent.fake_stream import FakeStream

GB = 10**9
HERE = Path("/workspace")


def model(parameters: int | None = 8 * GB, snapshot: int | None = 16 * GB, files: int = 10**7) -> Model:
    return Model([AssetRef(path="config.json", size=files, blake3="", url="")], parameters, snapshot)


def machine(*gpus_gb: float, memory_gb: float = 64.0) -> MachineFacts:
    cards = [GpuFacts(name="RTX 4090", memory_bytes=round(gb * GB)) for gb in gpus_gb]
    return MachineFacts(gpus=cards, memory_bytes=round(memory_gb * GB))


def test_the_disk_has_to_hold_the_files_and_three_versions() -> None:
    assert 48 * GB < disk_needed(model()) < 49 * GB
    assert disk_short(model(), 49 * GB, 0, HERE) == ""
    why = disk_short(model(), round(4.1 * GB), 0, HERE)
    assert why == "disk: needs 48.3 GB, has 4.1 GB free at /workspace"


def test_what_is_there_already_is_not_needed_again() -> None:
    assert disk_short(model(), 17 * GB, 32 * GB, HERE) == ""


def test_a_version_that_nobody_has_measured_is_reckoned_in_bf16() -> None:
    assert disk_needed(model(snapshot=None)) == disk_needed(model(snapshot=16 * GB))


@pytest.mark.parametrize(
    ("gpus", "used", "fits"),
    [((24,), 1, True), ((16,), 1, False), ((12, 12), 2, True), ((12, 12), 1, False), ((80,), 1, True)],
)
def test_the_weights_have_to_fit_the_gpus_that_are_used(gpus: tuple[float, ...], used: int, fits: bool) -> None:
    why = memory_short(model(), machine(*gpus), on_gpu=True, gpus_used=used)
    assert (why == "") is fits
    if not fits:
        assert "needs 16.0 GB on GPUs" in why
        assert "RTX 4090" in why


def test_without_a_gpu_the_memory_has_to_hold_float32() -> None:
    assert memory_short(model(), machine(memory_gb=64), on_gpu=False, gpus_used=1) == ""
    why = memory_short(model(), machine(memory_gb=32), on_gpu=False, gpus_used=1)
    assert why == "memory: the model needs 35.2 GB, this machine has 32.0 GB"


def test_what_is_not_known_is_not_refused() -> None:
    nothing = model(parameters=None, snapshot=None)
    assert memory_short(nothing, machine(1), on_gpu=True, gpus_used=1) == ""
    assert memory_short(model(), machine(), on_gpu=True, gpus_used=1) == "", "a driver that tells nothing"


def test_the_check_counts_what_lies_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "payload").write_bytes(b"x" * 1000)
    small = model(parameters=1000, snapshot=1000)
    free = disk_needed(small) - 1000
    assert folder_bytes(tmp_path) == 1000
    assert folder_bytes(tmp_path / "absent") == 0
    check(small, machine(memory_gb=1), tmp_path, free, on_gpu=False, gpus_used=1)
    with pytest.raises(Unfit, match="disk: needs"):
        check(small, machine(memory_gb=1), tmp_path, free - 1, on_gpu=False, gpus_used=1)
    with pytest.raises(Unfit, match="memory: the model needs"):
        check(small, machine(memory_gb=0), tmp_path, free, on_gpu=False, gpus_used=1)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_more_disk_is_never_worse(free: int, more: int) -> None:
    if disk_short(model(), free, 0, HERE) == "":
        assert disk_short(model(), free + more, 0, HERE) == ""


SEVEN_B = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "intermediate_size": 18944}
CONFIG = json.dumps(SEVEN_B).encode()


def settings(folder: Path = HERE, **more: object) -> AgentSettings:
    given = {"control_url": "http://control", "join_token": "t", "agent_dir": folder, "engine": "vllm", **more}
    return AgentSettings.model_validate(given)


def joined(assets: list[AssetRef], parameters: int) -> JoinAnswer:
    return JoinAnswer.model_construct(assets=assets, parameters=parameters, snapshot_bytes=1)


@pytest.mark.parametrize(
    ("gpus", "split", "more", "used"),
    [
        (3, Split(32), {}, 2),
        (3, Split(32), {"vllm_tensor_parallel": 1}, 1),
        (2, Split(), {"vllm_tensor_parallel": 4}, 2),
        (3, Split(32), {"vllm_args": "--pipeline-parallel-size 3"}, 3),
        (3, Split(32), {"vllm_args": "-tp=3"}, 3),
        (3, Split(32), {"vllm_args": "--seed 3"}, 2),
        (3, Split(), {}, 3),
        (0, Split(32), {}, 0),
    ],
)
def test_the_gpus_that_count_are_those_that_vllm_uses(
    gpus: int, split: Split, more: dict[str, object], used: int
) -> None:
    assert gpus_used(gpus, split, settings(**more)) == used


def test_a_config_tells_what_gpus_share_if_it_can_be_read(tmp_path: Path) -> None:
    assert split_in(tmp_path) == Split()
    for text, split in (
        (json.dumps(SEVEN_B), Split(28, 4, (3584, 18944))),
        (json.dumps({"text_config": {"num_attention_heads": 8}}), Split(8)),
        ("no json", Split()),
        ("[1]", Split()),
        ('{"text_config": 3}', Split()),
    ):
        (tmp_path / "config.json").write_text(text)
        assert split_in(tmp_path) == split, text


@pytest.mark.parametrize(
    ("gpus", "engine", "on_gpu", "asked", "fits"),
    [
        ((24, 24, 24), "vllm", True, None, False),
        ((24, 24, 24, 24), "vllm", True, None, True),
        ((24, 24, 24), "vllm", True, 3, True),
        ((80,), "transformers", True, None, True),
        ((24, 24, 24), "vllm", False, None, True),
    ],
)
def test_a_job_fits_the_gpus_that_will_be_used(
    gpus: tuple[float, ...], engine: str, on_gpu: bool, asked: int | None, fits: bool, tmp_path: Path
) -> None:
    """28 billion parameters over 32 heads: three GPUs would hold them, two don't."""
    given = settings(tmp_path, engine=engine, vllm_tensor_parallel=asked)
    facts = machine(*gpus, memory_gb=200)

    def attempt() -> None:
        check_job(joined([], 28 * GB), given, facts, on_gpu=on_gpu, split=lambda: Split(32))

    if fits:
        attempt()
    else:
        with pytest.raises(Unfit, match=r"needs 56\.0 GB on GPUs, 2 × RTX 4090 can take 41\.8 GB"):
            attempt()


@pytest.mark.parametrize(("engine", "split"), [("transformers", Split(32)), ("vllm", Split(7))])
def test_gpus_that_idle_hold_no_weights(engine: str, split: Split, tmp_path: Path) -> None:
    """An engine that uses one GPU only, or a model whose heads two can't share."""
    given, facts = settings(tmp_path, engine=engine), machine(40, 40)
    with pytest.raises(Unfit, match=r"needs 56\.0 GB on GPUs, 1 × RTX 4090 can take 34\.8 GB"):
        check_job(joined([], 28 * GB), given, facts, on_gpu=True, split=lambda: split)


def test_small_sizes_are_said_in_megabytes() -> None:
    why = memory_short(model(parameters=10**7), machine(memory_gb=0.02), on_gpu=False, gpus_used=1)
    assert why == "memory: the model needs 44.0 MB, this machine has 20.0 MB"


def test_what_can_t_fit_anyway_is_refused_before_the_config_is_asked_for(tmp_path: Path) -> None:
    def asked() -> Split:
        raise AssertionError

    with pytest.raises(Unfit, match="3 × RTX 4090"):
        check_job(joined([], 99 * GB), settings(tmp_path), machine(24, 24, 24), on_gpu=True, split=asked)
    check_job(joined([], GB), settings(tmp_path), machine(24), on_gpu=True, split=asked)


def asset(data: bytes = CONFIG, path: str = "config.json") -> AssetRef:
    return AssetRef(path=path, size=len(data), blake3=blake3(data).hexdigest(), url=f"http://store/{path}")


def store(data: bytes, asked: list[str]) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, content=data)

    return answer


@pytest.mark.parametrize(
    ("data", "split"), [(CONFIG, Split(28, 4, (3584, 18944))), (b"x" * len(CONFIG), Split()), (b"", Split())]
)
async def test_the_config_comes_ahead_of_all_other_files_or_is_not_known(
    data: bytes, split: Split, tmp_path: Path
) -> None:
    asked: list[str] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(store(data, asked))) as http:
        client, loop = NodeClient("http://control", http), asyncio.get_running_loop()
        assets = [asset(b"as large as it likes", "model.safetensors"), asset()]
        assert await asyncio.to_thread(fetched_split, client, assets, tmp_path, loop) == split
        assert await asyncio.to_thread(fetched_split, client, assets[:1], tmp_path / "none", loop) == Split()
    assert set(asked) == {"/config.json"}


def join_answer() -> JoinAnswer:
    """28 billion parameters that come with weights: a job with an adapter."""
    return JoinAnswer(
        node_id="n1", node_token="t", job_id="j", task=TaskSpec(name="none"), sampling=SamplingSpec(max_tokens=4),
        group_size=2, seed=0, assets=[asset(b"as large as it likes", "model.safetensors"), asset()],
        manifest_public_key="00", relay_token="t", uplink_bytes_per_s=None, max_upload_bytes=10**6,
        parameters=28 * GB, snapshot_bytes=1,
        directives=Directives(upstreams=[], target_version=0, lease_expires_in_s=600, heartbeat_interval_s=60),
    )  # fmt: skip


async def test_an_agent_with_gpus_that_would_idle_leaves_before_it_fetches_weights(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/config.json":
            return store(CONFIG, asked)(request)
        told = request.url.path.rsplit("/", 1)[-1]
        asked.append(told)
        return httpx.Response(200, text=join_answer().model_dump_json()) if told == "join" else httpx.Response(204)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        agent = Agent(
            settings(tmp_path), FakeStream(), http, relay=RelayAddress("127.0.0.1", 1, None),
            facts=machine(24, 24, 24), on_gpu=True,
        )  # fmt: skip
        ending = await asyncio.wait_for(agent.run(), 20)
    assert ending.unfit
    assert "2 × RTX 4090 can take" in ending.reason
    assert "/model.safetensors" not in asked
