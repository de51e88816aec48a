"""An engine that hangs in the middle of its work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import Completion, GenRequest
from app.rollout_agent.engines.transformers import TransformersEngine
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, eventually, running


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


async def test_a_machine_whose_engine_hangs_gives_itself_back_and_says_why(tmp_path: Path) -> None:
    engine, ahead = Hanging(), [0.0]
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.lease_s = 1e9
        settings = AgentSettings.model_validate(
            {
                "control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": tmp_path / "node",
                "device": "cpu", "orphan_timeout_s": 1e9,
            }
        )  # fmt: skip
        relay = RelayAddress("127.0.0.1", 1, None)
        agent = Agent(settings, engine, http, relay=relay, clock=lambda: time.monotonic() + ahead[0])
        life = asyncio.create_task(agent.run())
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
