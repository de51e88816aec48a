"""Prompts and answers from files with one JSON object a line.

Invariant: a file loads whole or is refused with the numbers of its wrong lines; no prompt is in both splits; a prompt's
number is its place in the file. In memory are the places of the lines, not the lines.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import JsonValue

from app.protocol.errors import BadInput, FieldError
from app.tasks.base import Prompt, Split, is_heldout, is_unicode
from app.tasks.names import wrong_params
from app.tasks.scorers import Scorer, scorer_of

PARAMS = ("train", "heldout", "prompt_field", "answer_field", "scorer", "template")
MOST_ERRORS = 20
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Fields:
    prompt: str
    answer: str
    template: str

    def row(self, raw: bytes) -> tuple[str, str]:
        """Prompt and answer of a line. Raises ValueError with what is wrong with it."""
        try:
            value: Any = json.loads(raw)
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        if not isinstance(value, dict):
            raise ValueError("is no JSON object")
        prompt, answer = value.get(self.prompt), value.get(self.answer)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"has no text in the field {self.prompt!r}")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
            raise ValueError(f"has no text or number in the field {self.answer!r}")
        if not is_unicode(prompt) or not is_unicode(str(answer)):
            raise ValueError("holds half a surrogate pair, which is no character")
        return self.template.replace("{prompt}", prompt), str(answer)


class JsonlTask:
    """Rows of a file, split by the text of the prompt or by file."""

    deterministic = True

    def __init__(self, folder: Path, fields: _Fields, score: Scorer, *, given: bool) -> None:
        self.name = "jsonl"
        self._fields, self._score = fields, score
        self._lock = threading.Lock()
        train = _Lines.read(folder / "train.jsonl", fields, "train")
        if given:
            self._rows = {"train": train, "heldout": _Lines.read(folder / "heldout.jsonl", fields, "heldout")}
            _check_apart(train, self._rows["heldout"])
            # What only told prompts apart takes most of the memory.
            for rows in self._rows.values():
                rows.digests.clear()
        else:
            self._rows = {"train": train.only(heldout=False), "heldout": train.only(heldout=True)}

    @classmethod
    def from_params(cls, params: Mapping[str, JsonValue], seed: int, folder: Path | None) -> Self:
        """Build from the parameters of docs/tasks.md and a folder with the files. Raises BadInput."""
        fields = checked(params)
        if folder is None:
            raise wrong_params("/train", "the files of this task are not here")
        return cls(folder, fields, scorer_of(params.get("scorer", "exact")), given=params.get("heldout") is not None)

    @property
    def train_size(self) -> int:
        """Number of training prompts."""
        return len(self._rows["train"].starts)

    @property
    def heldout_size(self) -> int:
        """Number of held-out prompts."""
        return len(self._rows["heldout"].starts)

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises BadInput when there is none."""
        return self._prompt("train", index)

    def heldout(self, index: int) -> Prompt:
        """Held-out prompt number `index`. Raises BadInput when there is none."""
        return self._prompt("heldout", index)

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """1.0 for an answer that the scorer takes as right, else 0.0."""
        return self._score(prompt.entry["answer"], completion_text)

    def _prompt(self, split: Split, index: int) -> Prompt:
        rows = self._rows[split]
        if not 0 <= index < len(rows.starts):
            raise BadInput(f"jsonl has {len(rows.starts)} {split} prompts; there is no number {index}")
        with self._lock:
            rows.file.seek(rows.starts[index])
            raw = rows.file.readline()
        text, answer = self._fields.row(raw)
        return Prompt(index, text, {"answer": answer})


@dataclass(frozen=True, slots=True)
class _Lines:
    """Where the rows of a file begin, and 8 bytes that tell their prompts apart."""

    file: BinaryIO
    starts: array[int]
    numbers: array[int]
    digests: dict[bytes, int]
    heldout: bytes
    """One byte a row: whether crc32 holds it out."""

    @classmethod
    def read(cls, path: Path, fields: _Fields, param: str) -> Self:
        """Check every line. A prompt that was there before counts once. Raises BadInput."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise wrong_params(f"/{param}", f"the file can't be read: {error.strerror}") from error
        starts, numbers, digests, heldout = array("q"), array("q"), dict[bytes, int](), bytearray()
        wrong: list[FieldError] = []
        for number, start, raw in _lines(file, param):
            try:
                prompt, _ = fields.row(raw)
            except ValueError as error:
                what = "is no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
                wrong.append(FieldError(f"/task/params/{param}", f"line {number} {what}"))
                if len(wrong) == MOST_ERRORS:
                    break
                continue
            digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
            if digest not in digests:
                digests[digest] = number
                starts.append(start)
                numbers.append(number)
                heldout.append(is_heldout(prompt))
        if wrong:
            file.close()
            raise BadInput(f"{param}: {'; '.join(error.detail for error in wrong[:3])}", errors=wrong)
        return cls(file, starts, numbers, digests, bytes(heldout))

    def only(self, *, heldout: bool) -> _Lines:
        """The rows of one side of the split."""
        kept = [i for i, held in enumerate(self.heldout) if bool(held) == heldout]
        starts, numbers = (array("q", (column[i] for i in kept)) for column in (self.starts, self.numbers))
        return _Lines(self.file, starts, numbers, {}, b"")


def _lines(file: BinaryIO, param: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and bytes of every line that is not empty."""
    start = 0
    for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(raw) > MAX_LINE_BYTES:
            raise wrong_params(f"/{param}", f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        if raw.strip():
            yield number, start, raw
        start += len(raw)


def checked(params: Mapping[str, JsonValue]) -> _Fields:
    """The fields to read. Raises BadInput for a parameter that is unknown, missing or of the wrong kind."""
    for key in params:
        if key not in PARAMS:
            raise wrong_params(f"/{key}", f"{key!r} is not a parameter of jsonl; known: {', '.join(PARAMS)}")
    values = {"prompt_field": "prompt", "answer_field": "answer", "template": "{prompt}", **params}
    if not isinstance(values.get("train"), str):
        raise wrong_params("/train", "train is required: the file with the prompts")
    for key in PARAMS[1:]:
        if values.get(key) is not None and not isinstance(values[key], str):
            raise wrong_params(f"/{key}", f"{key} must be a text")
    template = str(values["template"])
    if "{prompt}" not in template:
        raise wrong_params("/template", "template must hold {prompt}, which the prompt takes the place of")
    return _Fields(str(values["prompt_field"]), str(values["answer_field"]), template)


def _check_apart(train: _Lines, heldout: _Lines) -> None:
    both = train.digests.keys() & heldout.digests.keys()
    if both:
        pairs = sorted((heldout.digests[digest], train.digests[digest]) for digest in both)
        first = ", ".join(f"line {held} (line {number} of train)" for held, number in pairs[:5])
        detail = f"{len(both)} held-out prompts are training prompts, too: {first}; take them out of one of the files"
        raise wrong_params("/heldout", detail)
