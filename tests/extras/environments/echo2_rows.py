"""Questions of one turn, scored by rewards of all kinds: numbers, several at once, by a state, and one that fails."""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["RowsTaskset"]


class Data(vf.TaskData):
    answer: str


class RowState(vf.State):
    seen: list[str] = Field(default_factory=list)


class RowTask(vf.Task[Data, RowState, vf.TaskConfig]):
    @vf.metric
    async def seen(self, trace: vf.Trace) -> float:
        trace.state.seen.append(trace.last_reply)
        return 1.0

    @vf.reward
    async def right(self, task: Data, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        if trace.last_reply == "boom":
            raise ValueError("no such answer")
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def style(self, trace: vf.Trace) -> dict[str, float]:
        return {"short": float(len(trace.last_reply) < 4), "plain": float(trace.last_reply.isdigit())}

    @vf.reward(weight=0.125, priority=-1)
    async def first(self, trace: vf.Trace, runtime: Any = None) -> float:
        return float(runtime is None and trace.state.seen == [trace.last_reply])


class Config(vf.TasksetConfig):
    rows: int = 40


class RowsTaskset(vf.Taskset[RowTask, Config]):
    def load(self) -> Iterator[RowTask]:
        for i in range(self.config.rows):
            data = Data(prompt=f"What is {i} times 3?", system_prompt="Only the number.", answer=str(3 * i))
            yield RowTask(data, self.config.task)
