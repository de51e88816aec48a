"""What a task's name may be.

Invariant: reading a name runs no code of a plug-in; a name that can't be read is a BadInput that says what is known.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePosixPath

from app.protocol.errors import BadInput, FieldError
from app.protocol.task_spec import TaskSpec

GROUP = "echo2.tasks"
BUILTIN: tuple[str, ...] = ("jsonl", "poker", "reasoning_gym", "verifiers")
_FILE = re.compile(r"(?P<path>[^:]*\.py):(?P<attribute>.*)")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


@dataclass(frozen=True, slots=True)
class FileName:
    """`file.py:Class`: a file below the service's ECHO2_TASK_DIR, and what to make the task with."""

    path: PurePosixPath
    attribute: str


def file_name(name: str) -> FileName | None:
    """The two parts of `file.py:Class`; None for another kind of name. Raises BadInput for half of one."""
    found = _FILE.fullmatch(name)
    if found is None:
        if name.endswith(".py"):
            raise wrong_name(f"{name!r} names no class; write {name}:CLASS")
        return None
    path, attribute = found["path"], found["attribute"]
    if not _PATH.fullmatch(path):
        raise wrong_name(f"{path!r} must be a path below ECHO2_TASK_DIR of letters, digits, _, -, . and /, without ..")
    if not attribute.isidentifier():
        raise wrong_name(f"{attribute!r} after the colon must be the name of a class in {path}")
    return FileName(PurePosixPath(path), attribute)


def entry_point(name: str) -> EntryPoint | None:
    """The installed plug-in of this name, not loaded; None if there is none."""
    return next(iter(entry_points(group=GROUP, name=name)), None)


def known_names() -> Sequence[str]:
    """Built-in names and those of installed plug-ins."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group=GROUP))})


def unknown(name: str) -> BadInput:
    """What to answer to a name that nobody has."""
    known = known_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return wrong_name(f"task {name!r} is not known; {hint}known tasks: {', '.join(known)}; or file.py:Class")


def is_plugin(spec: TaskSpec) -> bool:
    """Whether its code is not ours. Raises BadInput for a name that nobody has."""
    if spec.name in BUILTIN:
        return False
    if file_name(spec.name) is None and entry_point(spec.name) is None:
        raise unknown(spec.name)
    return True


def wrong_name(detail: str) -> BadInput:
    """A BadInput about `task.name`."""
    return BadInput(detail, errors=[FieldError("/task/name", detail)])


def wrong_params(pointer: str, detail: str) -> BadInput:
    """A BadInput about `task.params`, or about the one that `pointer` (`/key`) names."""
    return BadInput(detail, errors=[FieldError(f"/task/params{pointer}", detail)])
