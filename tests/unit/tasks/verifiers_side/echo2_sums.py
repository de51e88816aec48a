"""Sums: a taskset of one turn. By `needs` its tasks want what is not to be had."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class Data(vf.TaskData):
    answer: str


class SumTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: Any, trace: Any) -> float:
        return float(trace.last_reply == task.answer)


class Contained(SumTask):
    NEEDS_CONTAINER = True

    async def setup(self, trace: Any, runtime: Any) -> None: ...

    @vf.reward
    async def tidy(self, trace: Any, runtime: Any) -> float:
        return 1.0


class Config(vf.TasksetConfig):
    contained: bool = False


class SumTaskset(vf.Taskset[SumTask, Config]):
    def load(self) -> Iterator[SumTask]:
        kind = Contained if self.config.contained else SumTask
        for i in [*range(40), 0, 1]:
            yield kind(Data(prompt=f"What is {i}+1?", answer=str(i + 1)), self.config.task)
