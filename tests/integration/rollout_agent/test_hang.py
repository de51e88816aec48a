"""A node that ends in the middle of its work, and was not told to drain: its engine hangs, its lease is over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from app.protocol.errors import IntegrityError
from app.rollout_agent import stalls
from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import Completion, Engine, GenRequest, StreamEngine
from app.rollout_agent.engines.paced import PacedEngine
from app.rollout_agent.engines.transformers import TransformersEngine
from app.snapshots.manifest import Manifest
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, Control, eventually, running
from tests.unit.rollout_agent.fake_stream import FakeStream


class Hanging(TransformersEngine):
    """Generates until it is told to hang."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.hang, self.hangs, self.let_go = threading.Event(), threading.Event(), threading.Event()

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """As ever, or for ever."""
        if self.hang.is_set():
            self.hangs.set()
            self.let_go.wait(60)
        return super().generate(requests)


class Standing(FakeStream):
    """Runs by itself until it gets version 1, which cuts what runs; then it stands still."""

    def __init__(self) -> None:
        super().__init__(on_swap="resubmit", odds=40)
        self.version = None
        self.stands = False
        self._running: asyncio.Task[None] | None = None

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        self.stands = version == 1
        await super().install(payload, manifest, version)
        self.deaf = self.stands

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        self._running = self._running or asyncio.create_task(self._run())
        return await super().sample(prompt_ids, seed=seed, max_tokens=max_tokens, temperature=temperature)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            if self.stands:
                return
            self.step()

    async def healthy(self, timeout_s: float) -> bool:
        return not self.stands


def agent_of(control: Control, engine: Engine | StreamEngine, http: httpx.AsyncClient, ahead: list[float]) -> Agent:
    """Its clock is so many seconds ahead."""
    settings = AgentSettings.model_validate(
        {
            "control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": control.root / "node",
            "device": "cpu", "orphan_timeout_s": 1e9,
        }
    )  # fmt: skip
    relay = RelayAddress("127.0.0.1", 1, None)
    return Agent(settings, engine, http, relay=relay, clock=lambda: time.monotonic() + ahead[0])


async def test_a_machine_whose_engine_hangs_gives_itself_back_and_says_why(tmp_path: Path) -> None:
    engine, ahead = Hanging(), [0.0]
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.lease_s = 1e9
        life = asyncio.create_task(agent_of(control, engine, http, ahead).run())
        await eventually(lambda: len(control.committed) > 4, "it works")
        engine.hang.set()
        await eventually(engine.hangs.is_set, "it hangs")
        assert not life.done()
        ahead[0] = 3600.0
        await eventually(lambda: bool(control.leaves), "it leaves", 20)
        engine.let_go.set()
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 1
        assert "the engine hangs" in ending.reason
        assert control.leaves[0].unfit
        assert [(r.kind, r.subject) for r in control.faults] == [("engine_error", "hung")]


async def test_what_is_known_of_the_samples_of_a_streaming_engine_that_hangs_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "TOLERATED", 1)
    monkeypatch.setattr(stalls, "LOOK_S", 0.5)
    engine, ahead = Standing(), [0.0]
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.lease_s, control.max_tokens = 1e9, 60
        life = asyncio.create_task(agent_of(control, engine, http, ahead).run())
        await eventually(lambda: len(control.committed) > 4, "it works")
        await control.publish(1)
        await eventually(lambda: control.beats[-1].policy_version == 1, "it has stood still")
        ahead[0] = 45.0
        ending = await asyncio.wait_for(life, 30)
    assert "the engine hangs" in ending.reason
    [leave] = control.leaves
    assert leave.unfit
    assert control.begun, "what the new version has cut can be gone on with"
    assert leave.tokens_wasted["interrupted"] > 0, "what the engine kept to itself"
    mine = sum(len(row.completion_ids) for rows in (control.rows, *control.begun.values()) for row in rows)
    assert leave.tokens_generated == mine + sum(leave.tokens_wasted.values())
    assert set(leave.unfinished).isdisjoint({*control.begun, *control.committed})


async def test_a_node_whose_lease_is_over_hands_over_what_its_batch_has(tmp_path: Path) -> None:
    engine, ahead = PacedEngine(TransformersEngine(threads=1), 60.0), [0.0]
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.lease_s, control.max_tokens = 40.0, 100
        life = asyncio.create_task(agent_of(control, engine, http, ahead).run())
        await eventually(lambda: bool(control.leased), "it is at work, which takes seconds")
        beats = len(control.beats)
        await eventually(lambda: len(control.beats) > beats + 8, "it has sampled for a while")
        control.status_of["heartbeat"] = IntegrityError("heartbeats are away")
        ahead[0] = 45.0
        ending = await asyncio.wait_for(life, 20)
    assert "lease" in ending.reason
    [leave] = control.leaves
    assert control.begun
    assert set(leave.unfinished).isdisjoint(control.begun)
    mine = sum(len(row.completion_ids) for rows in (control.rows, *control.begun.values()) for row in rows)
    assert leave.tokens_generated == mine > 0
    assert leave.tokens_wasted == {}


async def test_what_a_batch_engine_that_takes_too_long_still_tells_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.2)
    engine, ahead = PacedEngine(TransformersEngine(threads=1), 60.0), [0.0]
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.lease_s, control.max_tokens = 1e9, 100
        life = asyncio.create_task(agent_of(control, engine, http, ahead).run())
        await eventually(lambda: bool(control.leased), "it is at work, which takes seconds")
        beats = len(control.beats)
        await eventually(lambda: len(control.beats) > beats + 8, "it has sampled for a while")
        ahead[0] = 3600.0
        ending = await asyncio.wait_for(life, 30)
    assert "the engine hangs" in ending.reason
    [leave] = control.leaves
    assert leave.unfit
    assert control.begun, "it came back when it was interrupted"
    assert set(leave.unfinished).isdisjoint(control.begun)
    mine = sum(len(row.completion_ids) for rows in (control.rows, *control.begun.values()) for row in rows)
    assert leave.tokens_generated == mine > 0
    assert leave.tokens_wasted == {}
