from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.protocol.errors import BadInput
from app.protocol.job import SamplingSpec
from app.rollout_agent.engines.base import Completion, GenRequest, Interrupted
from app.rollout_agent.engines.paced import PacedEngine
from app.snapshots.manifest import Manifest

REQUEST = GenRequest([1], 1, 0, SamplingSpec())


class FixedEngine:
    """Answers every request with the same completions after `takes_s` on its clock."""

    version: int | None = 3
    quantisation: str | None = None
    tokenizer: Any = None

    def __init__(self, tokens: Sequence[int], takes_s: float) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.interrupted = False
        self._completions = [Completion([7] * n, [-0.5] * n, "length") for n in tokens]
        self._takes_s = takes_s

    def load(self, model_dir: Path) -> None: ...

    def install(self, payload: Path, manifest: Manifest, version: int) -> None: ...

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        self.now += self._takes_s
        return self._completions

    def interrupt(self) -> None:
        self.interrupted = True

    def close(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False


@pytest.mark.parametrize(("takes_s", "waits"), [(0.5, [1.5]), (0.0, [2.0]), (2.0, []), (3.0, [])])
def test_a_batch_takes_tokens_over_rate(takes_s: float, waits: list[float]) -> None:
    inner = FixedEngine([60, 40], takes_s)
    engine = PacedEngine(inner, 50.0, clock=lambda: inner.now, wait=inner.wait)
    completions = engine.generate([REQUEST])
    assert [len(c.token_ids) for c in completions] == [60, 40]
    assert inner.waits == pytest.approx(waits)
    assert inner.now == pytest.approx(max(2.0, takes_s))
    assert engine.version == 3


def test_an_interrupt_cuts_the_waiting_short() -> None:
    inner = FixedEngine([1_000_000], 0.0)
    engine = PacedEngine(inner, 1.0)
    failures: list[Exception] = []

    def generate() -> None:
        try:
            engine.generate([REQUEST])
        except Interrupted as error:
            failures.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    engine.interrupt()
    thread.join(10)
    assert not thread.is_alive()
    assert len(failures) == 1
    assert inner.interrupted


def test_an_interrupt_leaves_what_the_pace_allows() -> None:
    inner = FixedEngine([60, 40, 1], 0.0)

    def cut_short(seconds: float) -> bool:
        inner.now += seconds / 4
        return True

    engine = PacedEngine(inner, 50.0, clock=lambda: inner.now, wait=cut_short)
    completions = engine.generate([REQUEST])
    assert [(len(c.token_ids), len(c.logprobs)) for c in completions] == [(15, 15), (10, 10), (0, 0)]
    assert {c.finish_reason for c in completions} == {"abort"}


def test_the_pace_must_be_positive() -> None:
    with pytest.raises(BadInput):
        PacedEngine(FixedEngine([1], 0.0), 0.0)
