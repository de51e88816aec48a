"""Environments with habits of their own, by the name of their task."""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["HabitsEnv", "HabitsTaskset"]


class HabitTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Config(vf.TasksetConfig):
    habit: str


class HabitsTaskset(vf.Taskset[HabitTask, Config]):
    def load(self) -> Iterator[HabitTask]:
        for i in range(20):
            yield HabitTask(vf.TaskData(prompt=f"Number {i}", name=self.config.habit), self.config.task)


class EnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class HabitsEnv(vf.Env[EnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        match task.data.name:
            case "swallows":
                await asyncio.gather(agents.agent.run(task), return_exceptions=True)
            case "twice":
                await agents.agent.run(task)
                await agents.agent.run(task)
            case "twice-at-once":
                await asyncio.gather(agents.agent.run(task), agents.agent.run(task))
            case "closes":
                async with agents.agent.interaction(task) as interaction:
                    await interaction.turn()
                    trace = await interaction.close()
                    trace.record_reward("closed", trace.reward, 10.0)
            case "rude":
                async with agents.agent.interaction(task) as interaction:
                    await interaction.turn("Before you begin")
            case "borrows":
                async with agents.agent.provision(task) as box:
                    await agents.agent.run(task, runtime=box)
            case "breaks":
                await agents.agent.run(task)
                raise RuntimeError("after the answer")
            case _:
                return
