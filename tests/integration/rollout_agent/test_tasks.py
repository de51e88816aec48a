"""A node whose task is a file: fetched, checked, run beside the agent, and what becomes of its rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path

from blake3 import blake3

from app.protocol.task_spec import TaskFile, TaskSpec
from tests.integration.rollout_agent.fake_control import Control, eventually, running
from tests.integration.rollout_agent.test_agent import agent_of

SOURCE = b"""
import os
from app.tasks.base import Prompt, Reply

class Own:
    name, train_size, heldout_size = "own", 20, 5

    def __init__(self, params, seed): pass

    def train(self, index): return Prompt(index, f"p{index}", {})

    heldout = train

    def reward(self, prompt, text):
        if prompt.index == 1:
            os._exit(3)
        return prompt.index / 100

class Talk(Own):
    def respond(self, prompt, turns): return Reply(f"<{len(turns)}>") if len(turns) < 3 else None

    def episode_reward(self, prompt, turns): return float(len(turns))
"""


def give_file(control: Control, name: str = "own.py:Own") -> None:
    control.files["task/source.py"] = SOURCE
    file = TaskFile(role="source", size=len(SOURCE), blake3=blake3(SOURCE).hexdigest())
    control.task = TaskSpec(name=name, files=[file], limits={"processes": 2})


async def test_its_rewards_count_and_one_that_kills_its_process_is_no_zero(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        give_file(control)
        async with agent_of(control, tmp_path / "node") as (agent, life):
            await eventually(lambda: len(control.committed) >= 8, "work is committed")
            await eventually(lambda: len(control.faults) >= 1, "the reward that failed is reported")
            agent.stop()
            assert (await asyncio.wait_for(life, 20)).code == 0
    assert {round(row.reward * 100) for row in control.rows} == {row.prompt_index for row in control.rows}
    assert 1 not in {row.prompt_index for row in control.rows}
    assert {(report.kind, "exit status 3" in report.detail) for report in control.faults} == {("task_error", True)}


async def test_a_file_that_is_not_the_one_announced_ends_the_node(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        give_file(control)
        control.files["task/source.py"] = SOURCE.replace(b"100", b"001")
        async with agent_of(control, tmp_path / "node") as (_, life):
            ending = await asyncio.wait_for(life, 20)
        assert ending.code == 1
        assert "source.py does not have the size and hash" in ending.reason
        assert control.leased == {}


async def test_several_turns_on_a_node(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        give_file(control, "own.py:Talk")
        async with agent_of(control, tmp_path / "node") as (agent, life):
            await eventually(lambda: len(control.committed) >= 4, "work is committed")
            agent.stop()
            assert (await asyncio.wait_for(life, 20)).code == 0
    assert {row.reward for row in control.rows if row.finish_reason == "stop" and row.generated is None} <= {3.0}


async def test_a_job_that_scores_elsewhere_has_zeros(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        give_file(control)
        control.rewards = "learner"
        async with agent_of(control, tmp_path / "node") as (agent, life):
            await eventually(lambda: len(control.committed) >= 8, "work is committed")
            agent.stop()
            assert (await asyncio.wait_for(life, 20)).code == 0
    assert {row.reward for row in control.rows} == {0.0}
    assert {row.prompt_index for row in control.rows} >= {1, 2}
    assert control.faults == []
