"""Guess a number in four turns: an environment with a loop of its own."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class Data(vf.TaskData):
    answer: int


class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def brief(self, trace: Any) -> float:
        return 1.0 if trace.num_turns <= 2 else 0.0


class Config(vf.TasksetConfig):
    top: int = 30


class GuessTaskset(vf.Taskset[GuessTask, Config]):
    def load(self) -> Iterator[GuessTask]:
        for i in range(self.config.top):
            prompt = f"Guess my number, game {i}."
            yield GuessTask(Data(prompt=prompt, system_prompt="Be brief.", answer=i % 7), self.config.task)


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[EnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(3):
                if segment.terminated:
                    break
                if segment.last_reply == str(task.data.answer):
                    won = 1.0
                    break
                low = segment.last_reply.isdigit() and int(segment.last_reply) < task.data.answer
                segment = await interaction.turn("higher" if low else "lower")
        interaction.trace.record_reward("won", won, 1.0)
