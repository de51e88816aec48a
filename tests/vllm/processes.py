"""The processes of an agent's vLLM, found and asked from outside."""

from __future__ import annotations

from pathlib import Path

from app.rollout_agent.engines.vllm_command import HOST_SCRIPT
from app.rollout_agent.engines.vllm_http import EngineHttp
from tests.vllm.test_engine import children, command_of


def host_of(agent: int) -> int | None:
    """The process that leads the engine of an agent; None while it has none."""
    return next((pid for pid in children(agent) if HOST_SCRIPT.name in command_of(pid)), None)


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


async def counted(agent: int, name: str) -> float:
    """A counter of the agent's engine, named by the beginning of its lines."""
    host = host_of(agent)
    assert host is not None
    words = command_of(host).split()
    http = EngineHttp(int(words[words.index("--port") + 1]), environment_of(host)["ECHO2_ENGINE_KEY"])
    try:
        text = await http.metrics()
    finally:
        await http.aclose()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
