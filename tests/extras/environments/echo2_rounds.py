"""A game of several turns that uses what the package offers: a limit of turns, a stop, a task group, a finalizer."""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["RoundsEnv", "RoundsTaskset"]


class Data(vf.TaskData):
    word: str


class RoundsTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.stop
    async def given_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"

    @vf.reward
    async def found(self, task: Data, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.word)


class RoundsTaskset(vf.Taskset[RoundsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[RoundsTask]:
        # Without a prompt: the environment opens the conversation.
        return (RoundsTask(Data(word=word, name=word), self.config.task) for word in WORDS)


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class RoundsEnv(vf.Env[EnvConfig]):
    async def setup(self, agents: Any) -> None:
        assert agents.player.config.max_turns == 4
        agents.player.trainable = True

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            said: Any = f"A word of {len(task.data.word)} letters."
            while True:
                async with asyncio.TaskGroup() as group:
                    answer = group.create_task(interaction.turn(said))
                segment = answer.result()
                if segment.terminated or segment.last_reply == task.data.word:
                    break
                right = sum(a == b for a, b in zip(segment.last_reply, task.data.word, strict=False))
                said = [{"role": "user", "content": f"{right} letters are right."}]

    async def finalize(self, task: Any, episode: Any) -> None:
        [trace] = episode.by_agent["player"]
        assert trace.ok
        assert trace.is_completed
        trace.record_reward("turns", -trace.num_turns, 0.125)
        trace.record_reward("limit", trace.stop_condition == "max_turns", -1.0)
        trace.record_reward("stopped", trace.stop_condition == "given_up", -2.0)


WORDS = ["able", "acid", "aged", "also", "area", "army", "away", "baby", "back", "ball", "band", "bank", "base", "bath"]
