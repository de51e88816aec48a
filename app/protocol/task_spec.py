"""The task of a job as a user names it, and the files that go with it.

Invariant: names, sizes and limits are checked here; whether the task can be loaded, only loading it can tell.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from app.protocol.base import Spec

AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=1000)]


class TaskFile(Spec):
    """A file of a job's task: the source of a plug-in, prompts and answers. The control service makes it."""

    role: Literal["source", "train", "heldout"]
    size: int = Field(ge=0)
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def name(self) -> str:
        """Its name in the folder that the task is loaded from."""
        return f"{self.role}.{'py' if self.role == 'source' else 'jsonl'}"

    def key(self, job_id: str) -> str:
        """Its key in the object store. What it holds is in it, so that nothing is ever replaced."""
        return f"jobs/{job_id}/task/{self.blake3[:16]}-{self.name}"


class TaskLimits(Spec):
    """What the processes of a sandboxed task may use; docs/tasks.md."""

    timeout_s: float = Field(default=30, gt=0, le=600)
    """Seconds for one reward or one reply; a process that takes longer is killed."""
    load_timeout_s: float = Field(default=120, gt=0, le=3600)
    """Seconds for loading the task, for counting its prompts, and for one prompt."""
    memory_mb: int = Field(default=2048, ge=64, le=1_048_576)
    """Memory of each process, 2^20 bytes."""
    processes: int | None = Field(default=None, ge=1, le=256)
    """Processes side by side; null: one a processor, at most 4."""
    network: bool = False
    """Whether the task's code may use the network."""
    read: Annotated[list[AbsolutePath], Field(max_length=16)] | None = None
    """Files and folders that the task's code may read besides its own, Python's and the system's; null: none."""
    builtin: bool = False
    """Sandbox the built-in tasks, too, that otherwise run in the process that needs them."""


class TaskSpec(Spec):
    """Which data plane plug-in, with what parameters."""

    name: str = Field(min_length=1, max_length=200)
    """A built-in task, an installed entry point of the group `echo2.tasks`, or `file.py:Class`."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    limits: TaskLimits = TaskLimits()
    files: list[TaskFile] = Field(default_factory=list, max_length=3)
    """Filled in by the control service when the job is created, never by its owner."""
