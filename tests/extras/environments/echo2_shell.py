"""An agent that is to work with a shell, in an environment that prepares something."""

from typing import Any

import verifiers.v1 as vf
from echo2_rows import RowsTaskset

__all__ = ["RowsTaskset", "ShellEnv"]


class EnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "bash"}, max_output_tokens=100)  # type: ignore[arg-type]


class ShellEnv(vf.Env[EnvConfig]):
    async def start(self) -> None: ...

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)
