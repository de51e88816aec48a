"""Tasks that want, by the `kind` of their taskset, what a policy that only writes texts can't be given."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["OddTaskset"]


class Search(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def search(self, query: str) -> str:
        """Look something up."""
        return query


class Plain(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        return 1.0


class WithTools(Plain):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Search(vf.ToolsetConfig())]


class WithSetup(Plain):
    async def setup(self, trace: Any, runtime: Any) -> None: ...


class WithRuntime(Plain):
    @vf.reward
    async def ran(self, runtime: vf.Runtime) -> float:
        return 1.0


class WithStop(Plain):
    @vf.stop
    async def cut(self, response: vf.Response) -> bool:
        return True


class WithInterceptor(Plain):
    @vf.intercept
    async def change(self, request: vf.Request) -> None: ...


class Silent(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Without a reward."""


KINDS: dict[str, type[Any]] = {
    "tools": WithTools, "setup": WithSetup, "runtime": WithRuntime, "stop": WithStop, "intercept": WithInterceptor,
    "silent": Silent,
}  # fmt: skip
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
DATA: dict[str, dict[str, Any]] = {
    "image": {"image": "python:3.12"},
    "picture": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]}]},
    "shots": {"prompt": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3+3?"}]},
    "parts": {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 3+3?"}]},
    "none": {"prompt": None},
}


class Config(vf.TasksetConfig):
    kind: str


class OddTaskset(vf.Taskset[Any, Config]):
    def load(self) -> Iterator[Any]:
        kind = KINDS.get(self.config.kind, Plain)
        for i in range(20):
            row = {"prompt": f"Number {i}", **DATA.get(self.config.kind, {})}
            yield kind(vf.TaskData.model_validate(row), self.config.task)
