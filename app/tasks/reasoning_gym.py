"""Any dataset of the reasoning-gym package as a task.

Invariant: which split a question belongs to depends on its lower-cased text alone: crc32 % 8 == 0 is held out. The
package seeds item i with seed + i, so two seeds share most of their items and can't separate a split.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import threading
from collections.abc import Mapping
from typing import Any, Literal, Protocol, Self

import reasoning_gym
from pydantic import JsonValue
from reasoning_gym.factory import DATASETS

from app.protocol.errors import BadInput, FieldError
from app.tasks.base import Prompt, is_heldout

__all__ = ["ReasoningGymTask", "is_heldout"]

DEFAULT_SIZE = 20_000
MAX_SIZE = 10_000_000
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float: ...


class ReasoningGymTask:
    """Unique questions of one dataset, found lazily in the order of the dataset."""

    deterministic = True

    def __init__(self, name: str, dataset: _Dataset, size: int) -> None:
        self.name = f"reasoning_gym/{name}"
        self._dataset = dataset
        self._size = size
        self._scanned = 0
        self._seen: set[bytes] = set()
        self._rows: dict[Literal["train", "heldout"], list[int]] = {"train": [], "heldout": []}
        self._lock = threading.RLock()

    @classmethod
    def from_params(cls, params: Mapping[str, JsonValue], seed: int) -> Self:
        """Build from `{"dataset": name, "size": items to draw from, …parameters of the dataset}`. Raises BadInput."""
        name, size, rest = _checked(params)
        try:
            dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **rest)
        except (AssertionError, ValueError, TypeError, OSError, KeyError) as error:
            raise _wrong(
                "", f"dataset {name!r} refuses its parameters: {str(error) or type(error).__name__}"
            ) from error
        return cls(name, dataset, size)

    @property
    def train_size(self) -> int:
        """Number of unique training questions; draws the whole set the first time."""
        return self._count("train")

    @property
    def heldout_size(self) -> int:
        """Number of unique held-out questions; draws the whole set the first time."""
        return self._count("heldout")

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises BadInput when there is none."""
        return self._prompt("train", index)

    def heldout(self, index: int) -> Prompt:
        """Held-out prompt number `index`. Raises BadInput when there is none."""
        return self._prompt("heldout", index)

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """1.0 for a right answer, else 0.0. The package's partial credit for a contained answer is not a reward.

        Raises what the package raises where it can't score a right answer either.
        """
        with self._lock:
            try:
                score = self._dataset.score_answer(completion_text, prompt.entry)
            except _UNREADABLE:
                # Some of its scorers stumble over texts that are no answer. One that is broken does so over any.
                right = prompt.entry["answer"]
                self._dataset.score_answer(right if isinstance(right, str) else "", prompt.entry)
                return 0.0
            return 1.0 if score >= 1.0 else 0.0

    def _count(self, split: Literal["train", "heldout"]) -> int:
        with self._lock:
            self._scan(split, self._size)
            return len(self._rows[split])

    def _prompt(self, split: Literal["train", "heldout"], index: int) -> Prompt:
        with self._lock:
            self._scan(split, index)
            rows = self._rows[split]
            if not 0 <= index < len(rows):
                raise BadInput(f"{self.name} has {len(rows)} {split} prompts; there is no number {index}")
            entry = self._dataset[rows[index]]
        return Prompt(index=index, text=entry["question"], entry=entry)

    def _scan(self, split: Literal["train", "heldout"], index: int) -> None:
        """Draw items until the split has its prompt number `index` or the dataset is at its end."""
        while len(self._rows[split]) <= index and self._scanned < self._size:
            question = self._question(self._scanned)
            key = question.encode()
            if key not in self._seen:
                self._seen.add(key)
                self._rows["heldout" if is_heldout(question) else "train"].append(self._scanned)
            self._scanned += 1

    def _question(self, item: int) -> str:
        try:
            return str(self._dataset[item]["question"])
        except _UNREADABLE as error:
            # Nothing it was made of is refused by the package before it fails to make a question of it.
            raise _wrong("", f"{self.name} can't make its question {item} with these parameters: {error}") from error


def _checked(params: Mapping[str, JsonValue]) -> tuple[str, int, dict[str, JsonValue]]:
    name = params.get("dataset")
    if not isinstance(name, str) or name not in DATASETS:
        near = difflib.get_close_matches(str(name), DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        known = ", ".join(sorted(DATASETS))
        what = "is required" if name is None else f"{name!r} is not a dataset of reasoning-gym"
        raise _wrong("/dataset", f"dataset {what}; {hint}known: {known}")
    size = params.get("size", DEFAULT_SIZE)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
        raise _wrong("/size", f"size {size!r} must be a whole number from 1 to {MAX_SIZE}")
    rest = {key: value for key, value in params.items() if key not in ("dataset", "size")}
    fields = {f.name: f.default for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")}
    for key in rest:
        if key not in fields:
            detail = f"{key!r} is not a parameter of dataset {name!r}; known: {', '.join(sorted([*fields, 'size']))}"
            raise _wrong(f"/{key}", detail + ("; the seed is the job's" if key == "seed" else ""))
        if _is_number(fields[key]) and not _is_number(rest[key]):
            raise _wrong(f"/{key}", f"{key} is {json.dumps(rest[key])[:50]}, expected a number such as {fields[key]}")
    return name, size, rest


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(pointer: str, detail: str) -> BadInput:
    return BadInput(detail, errors=[FieldError(f"/task/params{pointer}", detail)])
