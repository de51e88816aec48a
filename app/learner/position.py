"""Where a training stands, and what the loop needs of others.

Invariant: a `Position` is all that the loop has to know, beside trainer and buffer, to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from app.learner.buffer import Group
from app.learner.trainer import StepMetrics, TrainerState
from app.protocol.learner import EvalReport, StepReport


class Trainer(Protocol):
    """The part of GRPOTrainer that the loop uses."""

    steps: int

    def step(self, groups: Sequence[Group]) -> StepMetrics: ...
    def snapshot(self, *, optimizer: bool = True) -> TrainerState: ...


class Journal(Protocol):
    """Where steps and evaluations are written down for people."""

    def step(self, report: StepReport) -> None: ...
    def evaluation(self, report: EvalReport) -> None: ...


class NoJournal:
    """Nothing is written down."""

    def step(self, report: StepReport) -> None:
        """Nothing."""

    def evaluation(self, report: EvalReport) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the loop ended. `aborted`: save nothing, say nothing."""

    kind: Literal["succeeded", "finished", "aborted"]
    reason: str


@dataclass(slots=True)
class Position:
    """Where the loop stands; a checkpoint holds it."""

    evaluated: int = -1
    last_publish: int = 0
    """Step from which the publish period counts."""
    published: int = -1
    """Newest version ever published; an older one is never published again."""
    active_s: float = 0.0
    best: tuple[int, float] | None = None
    """Step and value of the best held-out reward; of equal ones the first."""
    candidate: int | None = None
    """The version that the fleet evaluates now."""
