"""Engines by name.

Invariant: a name either gives an engine or a BadInput that lists the known names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeGuard

from app.protocol.errors import BadInput
from app.rollout_agent.config import AgentSettings
from app.rollout_agent.engines.base import Engine, StreamEngine


def _transformers(device: str, threads: int | None) -> Engine:
    # Importing the package takes seconds and should cost only those who use it.
    from app.rollout_agent.engines.transformers import TransformersEngine

    return TransformersEngine(device=device, threads=threads)


_FACTORIES: Mapping[str, Callable[[str, int | None], Engine]] = {"transformers": _transformers}
ENGINES: tuple[str, ...] = tuple(sorted(_FACTORIES))


def make_engine(settings: AgentSettings) -> Engine:
    """The engine that the settings ask for. Raises BadInput for an unknown name or a device that is not there."""
    factory = _FACTORIES.get(settings.engine)
    if factory is None:
        raise BadInput(f"ECHO2_ENGINE {settings.engine!r} is not known; known engines: {', '.join(ENGINES)}")
    device = choose_device(settings.device)
    threads = settings.threads or (1 if device == "cpu" else None)
    engine = factory(device, threads)
    if settings.sim_tokens_per_s is None:
        return engine
    from app.rollout_agent.engines.paced import PacedEngine

    return PacedEngine(engine, settings.sim_tokens_per_s)


def is_stream(engine: Engine | StreamEngine) -> TypeGuard[StreamEngine]:
    """Whether an engine samples single completions side by side, rather than batches."""
    return inspect.iscoroutinefunction(engine.load)


def choose_device(wanted: str) -> str:
    """`cpu` or `cuda`. Raises BadInput when a GPU is asked for and there is none."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise BadInput("ECHO2_DEVICE is cuda, but PyTorch finds no GPU; use cpu or auto")
    if wanted == "auto":
        return "cuda" if available else "cpu"
    return wanted


def gpu_name() -> str:
    """Name of the first GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
