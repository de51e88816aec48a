"""A streaming engine slowed down to a given number of completion tokens a second: a simulated slow machine.

Invariant: over any stretch of time the completions that are given out have at most rate · time tokens, however many run
side by side; what they hold is the inner engine's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from app.protocol.errors import BadInput
from app.protocol.node import Weights
from app.rollout_agent.engines.base import Completion, Load, StreamEngine
from app.snapshots.manifest import Manifest


class PacedStream:
    """Wraps a StreamEngine."""

    def __init__(
        self,
        inner: StreamEngine,
        tokens_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if tokens_per_s <= 0:
            raise BadInput(f"tokens per second must be more than 0, not {tokens_per_s}")
        self._inner = inner
        self._rate = tokens_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        """When all tokens given out so far would have come from a machine of this rate."""

    @property
    def version(self) -> int | None:
        """The inner engine's version."""
        return self._inner.version

    @property
    def quantisation(self) -> str | None:
        """The inner engine's."""
        return self._inner.quantisation

    @property
    def tokenizer(self) -> Any:
        """The inner engine's tokenizer."""
        return self._inner.tokenizer

    @property
    def weights(self) -> Weights | None:
        """The inner engine's."""
        return self._inner.weights

    @property
    def patience_s(self) -> float:
        """The inner engine's."""
        return self._inner.patience_s

    async def load(self, model_dir: Path) -> None:
        """As the inner engine."""
        await self._inner.load(model_dir)

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """As the inner engine."""
        await self._inner.install(payload, manifest, version)

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        """As the inner engine, then wait for the completion's turn."""
        made = await self._inner.sample(prompt_ids, seed=seed, max_tokens=max_tokens, temperature=temperature)
        now = self._clock()
        self._free_at = max(now, self._free_at) + len(made.token_ids) / self._rate
        if made.finish_reason != "abort":
            await self._sleep(self._free_at - now)
        return made

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float) -> list[float]:
        """As the inner engine."""
        return await self._inner.score(prompt_ids, completion_ids, temperature)

    async def abort(self) -> None:
        """As the inner engine; completions that are finished and wait for their turn keep waiting."""
        await self._inner.abort()

    async def load_figures(self) -> Load:
        """As the inner engine."""
        return await self._inner.load_figures()

    async def healthy(self, timeout_s: float) -> bool:
        """As the inner engine."""
        return await self._inner.healthy(timeout_s)

    async def close(self) -> None:
        """As the inner engine."""
        await self._inner.close()
