"""A machine measured by hand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from app.cli import app
from app.fleet.priors import corrections, parse
from app.protocol.errors import BadInput
from app.protocol.startup import GpuFacts, MachineFacts
from app.rollout_agent.bench_model import prepare
from app.rollout_agent.bench_node import Measured, down_mbps, measure, short_name, with_links
from app.rollout_agent.config import AgentSettings
from app.rollout_agent.engines.base import Completion, GenRequest
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.room import Unfit
from tests.unit.rollout_agent.fake_stream import FakeStream
from tests.unit.rollout_agent.tiny import make_model, write_model_files


class Counting(TransformersEngine):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.asked: list[int] = []
        self.installs = 0

    def install(self, *args: object) -> None:
        """Count them."""
        self.installs += 1
        super().install(*args)  # type: ignore[arg-type]

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Count the samples."""
        self.asked.append(sum(request.n for request in requests))
        return super().generate(requests)


async def bench(engine: TransformersEngine, model: str, folder: Path) -> Measured:
    prepared = await asyncio.to_thread(prepare, model, folder / "bench")
    return await measure(
        engine, prepared, concurrencies=[1, 6], max_tokens=4, name="transformers", title=model, gpu_name="RTX 4090",
        facts=MachineFacts(),
    )  # fmt: skip


async def test_every_concurrency_is_measured_and_so_is_the_swap(tmp_path: Path) -> None:
    engine = Counting()
    found = await bench(engine, "tiny", tmp_path)
    assert set(engine.asked) == {1, 6}
    assert engine.installs == 2, "the second one is the swap"
    assert [row.concurrency for row in found.rows] == [1, 6]
    assert all(0 < row.tokens <= 4 * row.concurrency for row in found.rows)
    assert all(row.tokens_per_s == row.tokens / row.seconds for row in found.rows)
    assert found.tokens_per_s == max(row.tokens_per_s for row in found.rows)
    assert found.swap_s > 0
    assert 400_000 < found.parameters < 600_000
    assert found.snapshot_bytes > 2 * found.parameters


async def test_a_model_folder_is_measured_as_it_is(tmp_path: Path) -> None:
    folder = write_model_files(tmp_path / "mine")
    await asyncio.to_thread(make_model(folder, 1).save_pretrained, folder)
    found = await bench(TransformersEngine(threads=1), str(folder), tmp_path)
    assert found.parameters == sum(p.numel() for p in make_model(folder, 1).parameters())


class Streaming(FakeStream):
    """Ends every text with the model's own token."""

    def __init__(self, folder: Path) -> None:
        super().__init__(odds=10**6)
        self.folder = folder

    async def load(self, model_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        return Completion([5] * max_tokens, [-0.5] * max_tokens, "length")


@pytest.mark.parametrize(("asked", "gpus"), [(None, 2), (1, 1)])
async def test_only_the_gpus_that_share_the_model_are_told(tmp_path: Path, asked: int | None, gpus: int) -> None:
    """`tiny` has four heads, and the machine three GPUs."""
    prepared = await asyncio.to_thread(prepare, "tiny", tmp_path)
    facts = MachineFacts(gpus=[GpuFacts(name="RTX 4090", memory_bytes=24 * 10**9)] * 3)
    given = {"control_url": "http://control", "join_token": "t", "engine": "vllm", "vllm_tensor_parallel": asked}
    found = await measure(
        Streaming(prepared.folder), prepared, concurrencies=[1], max_tokens=4, name="vllm", title="tiny",
        gpu_name="RTX 4090", facts=facts, settings=AgentSettings.model_validate(given),
    )  # fmt: skip
    assert found.num_gpus == gpus


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        prepare(str(tmp_path), tmp_path / "bench")
    write_model_files(tmp_path / "bare")
    with pytest.raises(BadInput, match="safetensors"):
        prepare(str(tmp_path / "bare"), tmp_path / "bench")


async def test_the_speed_of_nonsense_is_not_told(tmp_path: Path) -> None:
    class Short(TransformersEngine):
        def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
            return super().generate(requests)[1:]

    with pytest.raises(Unfit, match="0 samples instead of 1"):
        await bench(Short(threads=1), "tiny", tmp_path)


def test_the_command_prints_a_table_and_json_that_priors_are_made_of() -> None:
    arguments = ["bench-node", "--max-tokens", "4", "--concurrency", "1,2", "--gpu-name", "RTX 4090"]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0, table.output
    assert re.search(r"│ +2 │ +\d+ │", table.output)
    assert "swapped in" in table.output
    assert "downlink not measured: give --down-url" in table.output
    text = CliRunner().invoke(app, [*arguments, "--json"])
    assert text.exit_code == 0, text.output
    line = text.stdout.strip()
    assert json.loads(line)["rows"][1]["concurrency"] == 2
    assert list(corrections(parse(line, "f"))) == ["RTX 4090"]
    assert CliRunner().invoke(app, ["bench-node", "--concurrency", "1,x"]).exit_code == 2


@asynccontextmanager
async def link() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("put"):
            await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        elif "/absent" in head:
            writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\nConnection: close\r\n\r\n" + bytes(4_000_000))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


MEASURED = Measured("RTX 4090", 1, "vllm", "tiny", 1, 1, 1, 1.0, [], 0.0, 0.0, 1)


async def test_links_are_measured_where_there_is_an_address() -> None:
    async with link() as url:
        found = await with_links(MEASURED, f"{url}/file", f"{url}/put")
        assert found.down_mbps is not None
        assert found.down_mbps > 1
        assert found.up_mbps is not None
        assert found.up_mbps > 1
        assert found.notes == []
        absent = await with_links(MEASURED, f"{url}/absent", None)
    assert (absent.down_mbps, absent.up_mbps) == (None, None)
    assert absent.notes == [
        "downlink not measured: the address answers HTTP 404",
        "uplink not measured: give --up-url",
    ]
    gone = await with_links(MEASURED, url, None)
    assert gone.notes[0].startswith("downlink not measured: the address can't be read")


def test_names_are_those_of_marketplaces() -> None:
    assert short_name("NVIDIA GeForce RTX 4090") == "RTX 4090"
    assert short_name("NVIDIA A100-SXM4-80GB") == "A100-SXM4-80GB"
    assert short_name("CPU") == "CPU"


async def test_a_get_is_not_compressed() -> None:
    """Else the rate would be that of other bytes."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["accept-encoding"])
        return httpx.Response(200, stream=httpx.ByteStream(b"x"))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        await down_mbps(http, "http://x/")
    assert seen == ["identity"]
