"""What a data-plane plug-in is.

Invariant: a task is a pure function of its spec and seed; the same index gives the same prompt in every process, and no
prompt of the held-out split is ever in the training split, whatever the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `entry` is what the task needs to score an answer and means nothing to anybody else."""

    index: int
    text: str
    entry: Mapping[str, Any] = field(repr=False)


class Task(Protocol):
    """Prompts, their split and their reward. Implementations are safe to use from several threads."""

    @property
    def name(self) -> str:
        """For people and logs, e.g. `reasoning_gym/spell_backward`."""
        ...

    @property
    def train_size(self) -> int:
        """Number of training prompts. May have to build the whole set once."""
        ...

    @property
    def heldout_size(self) -> int:
        """Number of held-out prompts. May have to build the whole set once."""
        ...

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`, 0 ≤ index < train_size. Raises BadInput outside."""
        ...

    def heldout(self, index: int) -> Prompt:
        """Held-out prompt number `index`, 0 ≤ index < heldout_size. Raises BadInput outside."""
        ...

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """Reward of an answer, finite."""
        ...
