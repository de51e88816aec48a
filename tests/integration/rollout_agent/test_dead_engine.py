"""A node whose engine dies while there is nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from app.protocol.node import Weights
from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import Completion
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, eventually, running
from tests.unit.rollout_agent.fake_stream import Mortal


class Alone(Mortal):
    """Runs by itself."""

    def __init__(self) -> None:
        super().__init__(odds=40)
        self.version = None

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        made = super().sample(prompt_ids, seed=seed, max_tokens=max_tokens, temperature=temperature)
        asked = asyncio.create_task(made)
        while not asked.done():
            await asyncio.sleep(0.01)
            self.step()
        return await asked


async def test_a_node_whose_idle_engine_has_died_goes_on_with_the_next_version(tmp_path: Path) -> None:
    engine = Alone()
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        settings = AgentSettings.model_validate(
            {"control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": tmp_path / "node", "device": "cpu"}
        )
        agent = Agent(settings, engine, http, relay=RelayAddress("127.0.0.1", 1, None))
        life = asyncio.create_task(agent.run())
        await eventually(lambda: len(control.committed) > 4, "it works")
        control.give_work = False
        await eventually(lambda: control.leased.keys() == control.committed.keys(), "it has nothing to do")
        engine.die()
        await control.publish(1)
        await eventually(lambda: control.beats[-1].policy_version == 1 or life.done(), "it has the next version")
        assert not life.done()
        control.give_work = True
        await eventually(lambda: 1 in control.committed.values(), "it works again")
        engine.weights = Weights(version=1, engine="fake", digest="a" * 64)
        await eventually(lambda: control.beats[-1].weights == engine.weights, "it tells what its engine says")
        agent.stop()
        assert (await asyncio.wait_for(life, 20)).code == 0
    assert engine.loads == 2
    [report] = [r for r in control.faults if r.subject == "install"]
    assert (report.kind, report.version) == ("engine_error", 1)
    assert "does not run" in report.detail
