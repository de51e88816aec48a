"""Tasks by name, in this process or in a sandbox.

Invariant: a TaskSpec either loads or is answered with a BadInput that names what is wrong and what is known; code that
is not ours is never imported into the process that asks.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from app.protocol.task_spec import TaskSpec
from app.tasks.base import Task
from app.tasks.build import build
from app.tasks.names import BUILTIN, is_plugin
from app.tasks.plain import PLAIN
from app.tasks.sandbox import SandboxTask, open_sandboxed

TASKS: tuple[str, ...] = BUILTIN
"""Names that `load_task` knows by itself; plug-ins have more."""


def is_sandboxed(spec: TaskSpec) -> bool:
    """Whether the task runs in processes of its own: plug-ins, what may hang or run what an answer says, and by
    `limits.builtin` all others.

    Raises BadInput for an unknown name.
    """
    return is_plugin(spec) or _reads_answers(spec) or spec.limits.builtin


def _reads_answers(spec: TaskSpec) -> bool:
    """Whether more is done with an answer than to compare it."""
    match spec.name:
        case "reasoning_gym":
            return isinstance(spec.params.get("dataset"), str) and spec.params["dataset"] not in PLAIN
        case "jsonl":
            return spec.params.get("scorer") == "math"
    return spec.name == "verifiers"


def preload() -> None:
    """Import what tasks need that are made in this process: seconds of work in which Python lets others run too rarely
    for a service that has to answer. Once done, `load_task` imports nothing of this size."""
    for name in ("jsonl", "poker", "reasoning_gym"):
        import_module(f"app.tasks.{name}")


def load_task(spec: TaskSpec, seed: int, folder: Path | None = None) -> Task:
    """The task that a job names; `folder` holds the files of `spec.files`, if there are any.

    Raises BadInput for an unknown name or a wrong parameter, TaskFailed for a plug-in that fails.
    """
    return open_sandboxed(spec, seed, folder) if is_sandboxed(spec) else build(spec, seed, folder)


def check_task(spec: TaskSpec, folder: Path | None = None) -> None:
    """Raises BadInput as `load_task` does, and for a task without a first prompt. Draws nothing beyond that one."""
    task = load_task(spec, 0, folder)
    try:
        task.train(0)
    finally:
        if isinstance(task, SandboxTask):
            task.close()
