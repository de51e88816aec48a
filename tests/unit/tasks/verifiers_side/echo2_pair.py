"""Two agents, which is one too many."""

from typing import Any

import verifiers.v1 as vf
from echo2_sums import SumTaskset

__all__ = ["PairEnv", "SumTaskset"]


class EnvConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    two: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[EnvConfig]):
    async def run(self, task: Any, agents: Any) -> None: ...
