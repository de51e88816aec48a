"""A node that must stop in the middle of its work, and the one that goes on with it."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx

from app.protocol.node import NodeState
from app.rollout_agent.agent import STOP_GRACE_S, Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import Completion, Engine, StreamEngine
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.lifecycle import Ending
from tests.integration.rollout_agent.fake_control import GROUP_SIZE, JOIN_TOKEN, Control, eventually, running
from tests.integration.rollout_agent.test_process import log_of, start
from tests.unit.rollout_agent.fake_stream import FakeStream, next_token

MAX_TOKENS = 60


class Ticking(FakeStream):
    """Runs by itself, at so many seconds a token."""

    def __init__(self, tick_s: float, *, on_swap: str = "continue") -> None:
        super().__init__(on_swap=on_swap, odds=40)
        self.version = None
        self._tick_s = tick_s
        self._ticking: asyncio.Task[None] | None = None

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        self._ticking = self._ticking or asyncio.create_task(self._tick())
        return await super().sample(prompt_ids, seed=seed, max_tokens=max_tokens, temperature=temperature)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self.step()

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        await super().close()


def agent_of(control: Control, folder: Path, engine: Engine | StreamEngine, http: httpx.AsyncClient) -> Agent:
    settings = AgentSettings.model_validate(
        {"control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": folder, "device": "cpu"}
    )
    return Agent(settings, engine, http, relay=RelayAddress("127.0.0.1", 1, None))


async def ended(life: asyncio.Task[Ending], within_s: float = 20.0) -> Ending:
    return await asyncio.wait_for(life, within_s)


def continued(control: Control) -> int:
    """Holds what was committed of begun groups against their beginnings; how many samples were cut."""
    cut = 0
    for item, beginning in control.begun.items():
        after = {row.sample_index: row for row in control.rows if row.work_item == item}
        assert sorted(after) == list(range(GROUP_SIZE)), item
        for row in beginning:
            whole, size = after[row.sample_index], len(row.completion_ids)
            assert whole.prompt_ids == row.prompt_ids
            assert list(whole.completion_ids)[:size] == list(row.completion_ids)
            assert list(whole.logprobs)[:size] == list(row.logprobs)
            assert whole.span_versions[0] == row.span_versions[0]
            cut += row.finish_reason == "abort"
    return cut


async def test_a_node_that_nobody_hears_does_not_wait_to_hand_over(tmp_path: Path) -> None:
    async with httpx.AsyncClient() as http:
        async with running(tmp_path) as (control, _):
            control.max_tokens = MAX_TOKENS
            agent = agent_of(control, tmp_path / "one", Ticking(0.05), http)
            life = asyncio.create_task(agent.run())
            await eventually(lambda: bool(control.leased), "it is at work")
        agent.terminated()
        ending = await ended(life, STOP_GRACE_S + 6)
        assert (ending.code, ending.reachable) == (0, False)
        assert "nobody heard" in ending.reason


async def test_a_streaming_node_that_is_terminated_is_finished_by_another(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.max_tokens = MAX_TOKENS
        agent = agent_of(control, tmp_path / "one", Ticking(0.05), http)
        life = asyncio.create_task(agent.run())
        await eventually(lambda: len(control.committed) >= 2, "groups are committed one by one")
        assert set(control.leased) > set(control.committed), "while others are in flight"
        agent.terminated()
        ending = await ended(life, STOP_GRACE_S + 6)
        assert ending.code == 0
        [leave] = control.leaves
        assert control.begun, "unfinished groups were handed over"
        assert set(control.committed) | set(control.begun) | set(leave.unfinished) == set(control.leased)
        assert not set(control.begun) & (set(control.committed) | set(leave.unfinished))
        assert leave.tokens_generated > 0
        assert leave.tokens_wasted == {}

        control.token_used, control.give_work = False, False
        await control.publish(1)
        before = control.beats[-1]
        life = asyncio.create_task((second := agent_of(control, tmp_path / "two", Ticking(0.002), http)).run())
        await eventually(lambda: set(control.begun) <= set(control.committed), "they are finished by the other")
        await eventually(lambda: control.beats[-1].tokens_generated > 0, "tokens are told")
        second.stop()
        await ended(life)
    assert continued(control) > 0
    samples = Counter(row.work_item for row in control.rows)
    assert set(samples.values()) == {GROUP_SIZE}
    for row in control.rows:
        ids = list(row.completion_ids)
        assert [next_token([*row.prompt_ids, *ids[:i]], 40)[0] for i in range(len(ids))] == ids, "as in one go"
    assert {tuple(row.span_versions) for row in control.rows if row.work_item in control.begun} >= {(0, 1)}
    assert before.state == NodeState.DRAINING


async def test_a_streaming_node_installs_new_versions_while_samples_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.max_tokens = MAX_TOKENS
        agent = agent_of(control, tmp_path / "node", Ticking(0.02), http)
        life = asyncio.create_task(agent.run())
        for version in (1, 2, 3):
            done = len(control.committed)
            await eventually(lambda done=done: len(control.committed) > done, "groups are committed")  # type: ignore[misc]
            await control.publish(version)
            await eventually(
                lambda version=version: control.beats[-1].policy_version == version,  # type: ignore[misc]
                "it is installed at once",
            )
        await eventually(lambda: any(3 in row.span_versions for row in control.rows), "v3 is sampled from")
        agent.stop()
        await ended(life)
    assert any(len(row.span_versions) > 1 for row in control.rows), "samples went on over a swap"
    rates = [beat.tokens_per_s for beat in control.beats if beat.tokens_per_s is not None]
    assert rates
    assert control.beats[-1].tokens_wasted == {}


async def test_a_terminated_process_in_a_long_batch_is_finished_by_another_engine_as_in_one_go(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.max_tokens = 100
        # A group takes some seconds.
        process = await start(control, tmp_path / "one", ECHO2_SIM_TOKENS_PER_S="60")
        try:
            await eventually(lambda: bool(control.leased), "it is at work", 60)
            beats = len(control.beats)
            await eventually(lambda: len(control.beats) > beats + 8, "it has sampled for a while")
            process.send_signal(signal.SIGTERM)
            log = await log_of(process)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, log
        assert control.begun, log
        control.token_used, control.give_work = False, False
        async with httpx.AsyncClient() as http:
            second = agent_of(control, tmp_path / "two", TransformersEngine(threads=1), http)
            life = asyncio.create_task(second.run())
            await eventually(lambda: set(control.begun) <= set(control.committed), "the other node finishes it")
            second.stop()
            await ended(life)
        assert continued(control) > 0
