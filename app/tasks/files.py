"""The files of a task: taken once, when the job is created, and never looked up by name again.

Invariant: what learner and nodes load is, byte for byte, what was checked when the job was created; a file comes from
the service's own folder or object store, never from a node, and no path leads out of that folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from blake3 import blake3

from app.protocol.errors import BadInput, FieldError, IntegrityError, NotFound, TaskFailed
from app.protocol.task_spec import TaskFile, TaskSpec
from app.tasks.names import file_name, wrong_name, wrong_params
from app.tasks.registry import check_task

Role = Literal["source", "train", "heldout"]
MAX_SOURCE_BYTES = 1 << 20
MAX_ROWS_BYTES = 2 << 30
LOAD_S = 300.0
"""Who posts a job waits while its task is loaded: not longer than this, whatever its own limit is later on."""
STORE = "store:"
STORE_PREFIX = "tasks/"


class Sized(Protocol):
    """What an object store knows of an object."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...


class FileStore(Protocol):
    """What is needed of an object store (`app.storage.objects`)."""

    def head(self, key: str) -> Sized | None:
        """Size, or None if there is no such object."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Store a file."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Put an object into a file, a block at a time. Raises NotFound."""
        ...


class TaskIntake:
    """Checks the task of a new job and puts its files beside the job's other objects."""

    def __init__(self, task_dir: Path | None, objects: FileStore) -> None:
        self._task_dir = task_dir
        self._objects = objects

    def __call__(self, spec: TaskSpec, job_id: str) -> TaskSpec:
        """The spec with its `files`. Raises BadInput for a task that can't be loaded."""
        if spec.files:
            detail = "files is filled in by the service; leave it out"
            raise BadInput(detail, errors=[FieldError("/task/files", detail)])
        with tempfile.TemporaryDirectory(prefix="echo2-task-files-") as scratch:
            folder = Path(scratch)
            files = [self._take(role, source, folder) for role, source in sources(spec).items()]
            whole = spec.model_copy(update={"files": files})
            try:
                check_task(_for_now(whole), folder)
            except TaskFailed as error:
                raise wrong_name(f"{spec.name} can't be used: {error.detail}") from error
            for file in files:
                self._objects.put_file(file.key(job_id), folder / file.name)
        return whole

    def _take(self, role: Role, source: str, folder: Path) -> TaskFile:
        """A copy of the file that `source` names, and what is to be known of it."""
        wanted = TaskFile(role=role, size=0, blake3="0" * 64)
        path = folder / wanted.name
        if source.startswith(STORE):
            self._from_store(role, source.removeprefix(STORE), path)
        else:
            self._from_folder(role, source, path)
        # Once more: it may have grown meanwhile.
        _check_size(role, source, path.stat().st_size)
        return TaskFile(role=role, size=path.stat().st_size, blake3=digest(path))

    def _from_store(self, role: Role, key: str, path: Path) -> None:
        if not key.startswith(STORE_PREFIX):
            raise _wrong(role, f"the key {key[:200]!r} must begin with {STORE_PREFIX}")
        info = self._objects.head(key)
        if info is None:
            raise _wrong(role, f"the object store has no {key[:200]!r}")
        _check_size(role, key, info.size)
        try:
            self._objects.get_file(key, path)
        except NotFound as error:
            raise _wrong(role, f"the object store has no {key[:200]!r}") from error

    def _from_folder(self, role: Role, source: str, path: Path) -> None:
        try:
            found = self._found(role, source)
            opened = found.open("rb")
        except (OSError, RuntimeError, UnicodeEncodeError) as error:
            # A name too long, a link to itself, a file that the service may not read.
            what = error.strerror if isinstance(error, OSError) and error.strerror else "no path of a file"
            raise _wrong(role, f"{source[:200]!r} in ECHO2_TASK_DIR can't be read: {what}") from error
        with opened, path.open("wb") as copy:
            _check_size(role, source, os.fstat(opened.fileno()).st_size)
            shutil.copyfileobj(opened, copy)

    def _found(self, role: Role, source: str) -> Path:
        if self._task_dir is None:
            raise _wrong(role, f"{source} is a file, but this service has no folder for tasks: set ECHO2_TASK_DIR")
        if "\0" in source:
            raise _wrong(role, "a path can't hold a zero byte")
        top = self._task_dir.resolve()
        path = (top / source).resolve()
        if not path.is_relative_to(top):
            raise _wrong(role, f"{source[:200]!r} leads out of ECHO2_TASK_DIR")
        try:
            # Not `is_file`, which from Python 3.13 on hides that a link leads to itself.
            regular = stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            regular = False
        if not regular:
            raise _wrong(role, f"there is no file {source[:200]!r} in ECHO2_TASK_DIR")
        return path


def _for_now(spec: TaskSpec) -> TaskSpec:
    limits = spec.limits
    return spec.model_copy(
        update={"limits": limits.model_copy(update={"load_timeout_s": min(LOAD_S, limits.load_timeout_s)})}
    )


def sources(spec: TaskSpec) -> Mapping[Role, str]:
    """Where the files that a task needs come from, by role. Raises BadInput."""
    named = file_name(spec.name)
    if named is not None:
        return {"source": str(named.path)}
    if spec.name != "jsonl":
        return {}
    from app.tasks.jsonl import checked

    checked(spec.params)
    found: dict[Role, str] = {"train": str(spec.params["train"])}
    if spec.params.get("heldout") is not None:
        found["heldout"] = str(spec.params["heldout"])
    return found


def fetch_files(get_file: Callable[[str, Path], None], job_id: str, spec: TaskSpec, folder: Path) -> Path | None:
    """The task's files in `folder`, from the object store where they aren't there yet; None for a task without any.

    `get_file` puts an object into a file. Raises IntegrityError for a file that is not what the job was created with,
    and what `get_file` raises.
    """
    if not spec.files:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for file in spec.files:
        path = folder / file.name
        if path.is_file() and digest(path) == file.blake3:
            continue
        part = path.with_name(f".{path.name}.part")
        get_file(file.key(job_id), part)
        if digest(part) != file.blake3:
            part.unlink()
            raise IntegrityError(f"the task's file {file.name} is not the one that the job was created with")
        part.replace(path)
    return folder


def _check_size(role: Role, source: str, size: int) -> None:
    bound = MAX_SOURCE_BYTES if role == "source" else MAX_ROWS_BYTES
    if not 0 < size <= bound:
        raise _wrong(role, f"{source[:200]} has {size} bytes; 1 to {bound} are taken")


def digest(path: Path) -> str:
    """BLAKE3 of a file, hex."""
    with path.open("rb") as file:
        hasher = blake3()
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _wrong(role: Role, detail: str) -> BadInput:
    return wrong_name(detail) if role == "source" else wrong_params(f"/{role}", detail)
