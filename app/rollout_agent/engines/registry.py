"""Engines by name.

Invariant: a name either gives an engine or a BadInput that lists the known names.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from typing import Literal, TypeGuard

from app.protocol.errors import BadInput
from app.rollout_agent.config import AgentSettings
from app.rollout_agent.engines.base import Engine, StreamEngine

_Device = Literal["cpu", "cuda"]


def _transformers(settings: AgentSettings, device: _Device, threads: int | None) -> Engine:
    # Importing the package takes seconds and should cost only those who use it.
    from app.rollout_agent.engines.transformers import TransformersEngine

    engine = TransformersEngine(device=device, threads=threads)
    if settings.sim_tokens_per_s is None:
        return engine
    from app.rollout_agent.engines.paced import PacedEngine

    return PacedEngine(engine, settings.sim_tokens_per_s)


def _vllm(settings: AgentSettings, device: _Device, threads: int | None) -> StreamEngine:
    import torch

    from app.rollout_agent.engines.vllm import VllmEngine
    from app.rollout_agent.engines.vllm_command import VllmOptions

    options = VllmOptions(
        python=str(settings.vllm_python),
        device=device,
        work_dir=settings.agent_dir / "vllm",
        on_swap=settings.vllm_on_swap,
        gpus=torch.cuda.device_count() if device == "cuda" else 1,
        tensor_parallel=settings.vllm_tensor_parallel,
        memory_share=settings.vllm_memory_share,
        max_model_len=settings.vllm_max_model_len,
        max_sequences=settings.vllm_max_sequences,
        threads=threads,
        start_timeout_s=settings.vllm_start_timeout_s,
        extra_args=tuple(shlex.split(settings.vllm_args)),
    )
    engine = VllmEngine(options)
    if settings.sim_tokens_per_s is None:
        return engine
    from app.rollout_agent.engines.paced_stream import PacedStream

    return PacedStream(engine, settings.sim_tokens_per_s)


_Factory = Callable[[AgentSettings, _Device, int | None], Engine | StreamEngine]
_FACTORIES: Mapping[str, _Factory] = {"transformers": _transformers, "vllm": _vllm}
ENGINES: tuple[str, ...] = tuple(sorted(_FACTORIES))


def make_engine(settings: AgentSettings) -> Engine | StreamEngine:
    """The engine that the settings ask for. Raises BadInput for an unknown name or a device that is not there."""
    factory = _FACTORIES.get(settings.engine)
    if factory is None:
        raise BadInput(f"ECHO2_ENGINE {settings.engine!r} is not known; known engines: {', '.join(ENGINES)}")
    device = choose_device(settings.device)
    threads = settings.threads or (1 if device == "cpu" else None)
    return factory(settings, device, threads)


def is_stream(engine: Engine | StreamEngine) -> TypeGuard[StreamEngine]:
    """Whether an engine samples single completions side by side, rather than batches."""
    return inspect.iscoroutinefunction(engine.load)


def choose_device(wanted: str) -> _Device:
    """`cpu` or `cuda`. Raises BadInput when a GPU is asked for and there is none."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise BadInput("ECHO2_DEVICE is cuda, but PyTorch finds no GPU; use cpu or auto")
    if wanted == "auto":
        return "cuda" if available else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def gpu_name() -> str:
    """Name of the first GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
