"""Which engine a machine gets that may choose: `ECHO2_ENGINE=auto`.

Invariant: vLLM only where it is installed and every GPU is large enough for it; a name that was asked for is
taken as it is.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from app.protocol.startup import MachineFacts
from app.rollout_agent.config import AgentSettings

AUTO = "auto"
LEAST_GPU_BYTES = 15_000 * 1024 * 1024
"""As in deploy/agent/bootstrap.sh: smaller cards have no room for vLLM's graphs and a cache worth having."""


def has_vllm(settings: AgentSettings) -> bool:
    """Whether vLLM is here: in this Python, or in another one that the settings name."""
    return settings.vllm_python != Path(sys.executable) or find_spec("vllm") is not None


def engine_for(wanted: str, facts: MachineFacts, *, on_gpu: bool, has_vllm: bool) -> str:
    """The engine's name."""
    if wanted != AUTO:
        return wanted
    large = bool(facts.gpus) and all(gpu.memory_bytes >= LEAST_GPU_BYTES for gpu in facts.gpus)
    return "vllm" if on_gpu and has_vllm and large else "transformers"
