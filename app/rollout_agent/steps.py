"""Loading an engine and giving it a version, with an eye on the clock.

Invariant: a step is under way from its call to its end, and for no longer than the engine says that one may take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from app.rollout_agent.engines.base import StreamEngine
from app.snapshots.manifest import Manifest


class Steps:
    """`load` and `install` of an engine, never two at once. `clock`: monotonic seconds."""

    def __init__(self, engine: StreamEngine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._since: float | None = None

    @property
    def version(self) -> int | None:
        """The engine's."""
        return self._engine.version

    @property
    def under_way(self) -> bool:
        """Whether the engine is in the middle of one, and within its own time: nothing comes out of it then."""
        return self._since is not None and self._clock() - self._since <= self._engine.patience_s

    async def load(self, model_dir: Path) -> None:
        """As the engine."""
        with self._step():
            await self._engine.load(model_dir)

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """As the engine."""
        with self._step():
            await self._engine.install(payload, manifest, version)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._since = self._clock()
        try:
            yield
        finally:
            self._since = None
