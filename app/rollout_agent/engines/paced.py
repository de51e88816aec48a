"""An engine slowed down to a given number of completion tokens a second: a simulated slow machine.

Invariant: a batch of n tokens takes at least n / rate seconds; what it holds is the inner engine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.protocol.errors import BadInput
from app.protocol.proofs import trimmed
from app.rollout_agent.engines.base import Completion, Engine, GenRequest, Interrupted
from app.rollout_agent.proofs import start_proving
from app.snapshots.manifest import Manifest


class PacedEngine:
    """Wraps an engine. `wait(seconds)` returns True when it was cut short by `interrupt`."""

    def __init__(
        self,
        inner: Engine,
        tokens_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        if tokens_per_s <= 0:
            raise BadInput(f"tokens per second must be more than 0, not {tokens_per_s}")
        self._inner = inner
        self._rate = tokens_per_s
        self._clock = clock
        self._interrupted = threading.Event()
        self._wait = wait or self._interrupted.wait

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

    def load(self, model_dir: Path) -> None:
        """As the inner engine."""
        self._inner.load(model_dir)

    def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """As the inner engine."""
        self._inner.install(payload, manifest, version)

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """As the inner engine, then wait until the pace allows the batch; interrupted, it returns what the pace
        allows."""
        began = self._clock()
        completions = self._inner.generate(requests)
        tokens = sum(len(c.token_ids) for c in completions)
        rest = remaining(tokens, self._rate, self._clock() - began)
        if rest > 0 and self._wait(rest):
            completions = cut(completions, self._rate * (self._clock() - began) / tokens)
            if not any(c.token_ids for c in completions):
                raise Interrupted("generation was interrupted before its first token")
        return completions

    def prove(self) -> None:
        """As the inner engine. Raises BadInput if it can't."""
        start_proving(self._inner, "toploc")

    def interrupt(self) -> None:
        """End the waiting, and the inner engine's work."""
        self._interrupted.set()
        self._inner.interrupt()

    def close(self) -> None:
        """As the inner engine."""
        self._inner.close()


def cut(completions: Sequence[Completion], share: float) -> list[Completion]:
    """The beginnings of completions that came to this share of themselves, 0 to 1."""
    kept = [(c, int(len(c.token_ids) * min(1.0, share))) for c in completions]
    return [c if n == len(c.token_ids) else _beginning(c, n) for c, n in kept]


def _beginning(completion: Completion, tokens: int) -> Completion:
    """The first tokens, at most so many: as many as their proofs, if there are any, are of."""
    proofs = completion.proofs
    if proofs is not None:
        tokens, proofs = trimmed(proofs, tokens)
    return Completion(
        completion.token_ids[:tokens], completion.logprobs[:tokens], "abort", completion.spans, proofs=proofs
    )


def remaining(tokens: int, tokens_per_s: float, elapsed_s: float) -> float:
    """Seconds to wait after a batch of `tokens` that took `elapsed_s`."""
    return max(0.0, tokens / tokens_per_s - elapsed_s)
