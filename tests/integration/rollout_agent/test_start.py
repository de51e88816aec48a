"""A node's start: each step is told while it lasts, and what can't work says so before it costs anything."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from app.protocol.hub import HubRef
from app.protocol.node import NodeState
from app.protocol.startup import MachineFacts, StartPhase
from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import Completion, GenRequest
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.lifecycle import Ending
from app.snapshots.manifest import ADAPTER_ASSET
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, Control, eventually, running

FACTS = MachineFacts(cpus=2, memory_bytes=2**33, disk_free_bytes=2**33)


class SlowToLoad(TransformersEngine):
    """Loads until the test lets it."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.may_load = threading.Event()

    def load(self, model_dir: Path) -> None:
        """Hold the engine's thread as a large model does."""
        assert self.may_load.wait(20)
        super().load(model_dir)


class Broken(TransformersEngine):
    """Gives log-probs that can't be."""

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Positive ones."""
        return [replace(c, logprobs=[0.5] * len(c.logprobs)) for c in super().generate(requests)]


@asynccontextmanager
async def living(
    control: Control, folder: Path, engine: Any = None, facts: MachineFacts = FACTS, **more: str
) -> AsyncIterator[asyncio.Task[Ending]]:
    """A running agent; ended at the end."""
    settings = AgentSettings.model_validate(
        {"control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": folder, "device": "cpu", **more}
    )
    async with httpx.AsyncClient() as http:
        engine = engine or TransformersEngine(threads=1)
        agent = Agent(settings, engine, http, relay=RelayAddress("127.0.0.1", 1, None), facts=facts)
        life = asyncio.create_task(agent.run())
        try:
            yield life
        finally:
            if not life.done():
                agent.stop()
            await asyncio.wait_for(life, 20)


def phases(control: Control) -> list[StartPhase]:
    """As heartbeats showed them, repetitions left out."""
    told = [beat.start.phase for beat in control.beats if beat.start is not None]
    return [phase for phase, _ in itertools.groupby(told)]


async def test_every_step_of_the_start_is_told_and_the_first_speed_before_the_first_work(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.give_work = False
        async with living(control, tmp_path / "node"):
            await eventually(lambda: StartPhase.ACTIVE in phases(control), "it is active")
            beat = control.beats[-1]
            assert [told.phase for told in control.progress] == [StartPhase.JOINING]
            assert control.joins[0].facts == FACTS
            assert phases(control) == sorted(phases(control), key=lambda phase: phase.rank)
            assert {StartPhase.FETCHING, StartPhase.LOADING, StartPhase.WARMING} <= set(phases(control))
            assert beat.state is NodeState.ACTIVE
            assert beat.rollouts_per_s is not None
            assert beat.rollouts_per_s > 0
            assert beat.tokens_per_s is not None
            assert beat.tokens_per_s >= beat.rollouts_per_s
            assert control.committed == {}


async def test_the_join_does_not_wait_for_the_first_word_to_be_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()

    async def hangs(self: Control, request: Request) -> Response:
        await over.wait()
        return Response(status_code=204)

    monkeypatch.setattr(Control, "_progress", hangs)
    async with running(tmp_path) as (control, _), living(control, tmp_path / "node"):
        try:
            async with asyncio.timeout(6):
                await eventually(lambda: len(control.joins) == 1, "it has joined")
        finally:
            over.set()


async def test_its_heart_beats_while_the_engine_loads(tmp_path: Path) -> None:
    engine = SlowToLoad()
    async with running(tmp_path) as (control, _), living(control, tmp_path / "node", engine):

        def loading() -> list[float]:
            told = [beat.start for beat in control.beats if beat.start is not None]
            return [start.since_s or 0.0 for start in told if start.phase is StartPhase.LOADING]

        await eventually(lambda: len(loading()) >= 4, "heartbeats of a node that loads")
        assert loading() == sorted(loading()), "since when it loads does not start anew"
        assert loading()[-1] > loading()[0]
        engine.may_load.set()
        await eventually(lambda: len(control.committed) > 0, "it works")


async def test_a_machine_without_room_says_so_before_it_fetches(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.snapshot_bytes = 10**15
        async with living(control, tmp_path / "node") as life:
            ending = await asyncio.wait_for(life, 20)
        assert ending.code == 1
        assert ending.reason.startswith("disk: needs 3000000.3 GB, has ")
        (leave,) = control.leaves
        assert leave.unfit
        assert leave.reason == ending.reason
        assert not (tmp_path / "node" / "model").exists()


async def test_an_engine_that_gives_nonsense_never_gets_work(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        async with living(control, tmp_path / "node", Broken(threads=1)) as life:
            await asyncio.wait_for(life, 20)
        (leave,) = control.leaves
        assert leave.reason == "self-test: the engine gave a log-prob of 0.5"
        assert leave.unfit
        assert "work" not in control.calls


async def test_a_node_that_is_drained_in_its_start_is_not_unfit(tmp_path: Path) -> None:
    engine = SlowToLoad()
    async with running(tmp_path) as (control, _), living(control, tmp_path / "node", engine) as life:
        await eventually(lambda: StartPhase.LOADING in phases(control), "it loads")
        control.drain = True
        await eventually(lambda: bool(control.leaves), "it leaves")
        engine.may_load.set()
        await asyncio.wait_for(life, 20)
        assert not control.leaves[0].unfit


async def test_a_file_that_the_hub_does_not_give_is_told_and_comes_from_the_store(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    async with running(tmp_path) as (control, _):
        (control.model / "large.jsonl").write_bytes(b"as large as it likes")
        control.hub = HubRef(repo="org/m", revision="0" * 40)
        endpoint = {"hf_endpoint": f"http://127.0.0.1:{unused_tcp_port}"}
        async with living(control, tmp_path / "node", **endpoint):
            await eventually(lambda: NodeState.ACTIVE in control.states, "it is active")
        [report] = [r for r in control.reports if r.kind == "hub_failed"]
        assert report.subject == "large.jsonl"
        assert "can't be reached" in report.detail
        assert control.beats[-1].errors == {"hub_failed": 1}
    assert (tmp_path / "node" / "model" / "large.jsonl").read_bytes() == b"as large as it likes"


async def test_a_public_file_comes_from_the_hub_that_the_settings_name(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        (control.model / "large.jsonl").write_bytes(b"as large as it likes")
        control.hub = HubRef(repo="org/m", revision="0" * 40)
        control.files[f"hub/org/m/resolve/{control.hub.revision}/large.jsonl"] = b"as large as it likes"
        async with living(control, tmp_path / "node", hf_endpoint=f"{control.base_url}/objects/hub"):
            await eventually(lambda: NodeState.ACTIVE in control.states, "it is active")
        assert control.faults == []


async def test_what_an_earlier_job_left_on_the_machine_is_no_part_of_the_model(tmp_path: Path) -> None:
    """A machine of the user's own keeps its folder: the files of one model must not become those of the next."""
    model = tmp_path / "node" / "model"
    (model / "pinned").mkdir(parents=True)
    adapter = '{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}'
    for name, text in ((ADAPTER_ASSET, adapter), ("chat_template.jinja", "{{ messages }}"), (".old.part", "half")):
        (model / name).write_text(text)
    async with running(tmp_path) as (control, _), living(control, tmp_path / "node"):
        await eventually(lambda: bool(control.committed), "work is committed")
        assert {path.name for path in model.iterdir()} == {"pinned", *(path.name for path in control.model.iterdir())}
