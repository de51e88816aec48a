"""Where a training stands, and what the loop needs of others.

Invariant: a `Position` is all that the loop has to know, beside trainer and buffer, to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from app.learner.adaptive import State
from app.learner.buffer import Group
from app.learner.trainer import StepMetrics, TrainerState
from app.protocol.learner import EvalReport, StepReport

_UNDECIDED = 3
"""Candidates at most: one that is evaluated, one that is being published, one that waits for that."""


class Trainer(Protocol):
    """The part of GRPOTrainer that the loop uses."""

    @property
    def steps(self) -> int: ...
    def step(self, groups: Sequence[Group]) -> StepMetrics: ...
    def snapshot(self, *, optimizer: bool = True) -> TrainerState: ...


class Journal(Protocol):
    """Where steps and evaluations are written down for people."""

    def step(self, report: StepReport) -> None: ...
    def evaluation(self, report: EvalReport) -> None: ...
    def heard(self, step: int, reward: float) -> None: ...


class NoJournal:
    """Nothing is written down."""

    def step(self, report: StepReport) -> None:
        """Nothing."""

    def evaluation(self, report: EvalReport) -> None:
        """Nothing."""

    def heard(self, step: int, reward: float) -> None:
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
    candidates: tuple[int, ...] = ()
    """Versions that the fleet evaluates or will, oldest first, as long as their result is not known."""
    adaptive: State | None = None
    """What adaptive staleness begins with, if this goes on from a checkpoint."""

    def enter(self, step: int, replaced: int | None) -> None:
        """v_step is a candidate from now on, in place of `replaced`, which is never published."""
        self.evaluated = step
        self.candidates = (*(c for c in self.candidates if c != replaced), step)[-_UNDECIDED:]

    def published_first(self, step: int, *, told: int, due: bool) -> bool:
        """v_step, from a checkpoint, is about to be the first version that the control service is told of after v_told.

        It knows of no candidate after that, and v_step takes their place; it is one, too, if an exam is `due`. Returns
        whether that is news to its checkpoint.
        """
        before = self.candidates
        if due or any(c > told for c in before):
            self.candidates = tuple(c for c in before if c <= told)
            self.enter(step, replaced=None)
        return self.candidates != before

    def heard(self, step: int, reward: float) -> None:
        """The fleet's result for v_step. Exams end in their order: older candidates will have none any more."""
        if step in self.candidates and (self.best is None or reward > self.best[1]):
            self.best = (step, reward)
        self.candidates = tuple(c for c in self.candidates if c > step)
