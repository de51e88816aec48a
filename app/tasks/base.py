"""What a data-plane plug-in is.

Invariant: a task is a pure function of its spec and seed; the same index gives the same prompt in every process, and no
prompt of the held-out split is ever in the training split, whatever the seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 8
"""One question in this many is held out, where a task has no held-out prompts of its own."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `entry` is what the task needs to score an answer and means nothing to anybody else."""

    index: int
    text: str
    entry: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment of a multi-turn task says, not empty, before the policy goes on."""

    text: str


class Task(Protocol):
    """Prompts, their split and their reward. Implementations are safe to use from several threads.

    A task whose reward of the same answer may differ from one call to the next says so by an attribute
    `deterministic = False`; nobody holds a node to such a reward.
    """

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
        """Reward of an answer, finite. Of a multi-turn task: of an episode that this one turn is all of."""
        ...


class MultiTurnTask(Task, Protocol):
    """A task whose environment answers what the policy writes.

    Both calls are pure functions of what was said so far: they can be repeated anywhere, and nobody keeps a state.
    """

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        """What the environment says after the policy's `turns`, at least one; None when the episode is over."""
        ...

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        """Reward of an episode, finite; also of one that ran out of tokens before its end."""
        ...


def is_multi_turn(task: Task) -> TypeGuard[MultiTurnTask]:
    """Whether its environment answers. (An `isinstance` would look at all members; counting prompts may be slow.)"""
    return hasattr(task, "respond")


def is_deterministic(task: Task) -> bool:
    """Whether the reward of an answer can be computed again and must be the same."""
    return bool(getattr(task, "deterministic", True))


def is_heldout(question: str) -> bool:
    """Whether a question is kept from training. Upper and lower case count as the same question."""
    return zlib.crc32(question.lower().encode()) % HELDOUT_SHARE == 0


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON may hold half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
