"""Tasks by name.

Invariant: a TaskSpec either loads or is answered with a BadInput that names what is wrong and what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import JsonValue

from app.protocol.errors import BadInput, FieldError
from app.protocol.job import TaskSpec
from app.tasks.base import Task

Factory = Callable[[Mapping[str, JsonValue], int], Task]


def _reasoning_gym(params: Mapping[str, JsonValue], seed: int) -> Task:
    # The package takes more than a second to import, which whoever only lists names should not pay.
    from app.tasks.reasoning_gym import ReasoningGymTask

    return ReasoningGymTask.from_params(params, seed)


_FACTORIES: Mapping[str, Factory] = {"reasoning_gym": _reasoning_gym}
TASKS: tuple[str, ...] = tuple(sorted(_FACTORIES))
"""Names that `load_task` knows."""


def load_task(spec: TaskSpec, seed: int) -> Task:
    """The task that a job names. Raises BadInput for an unknown name or a wrong parameter."""
    factory = _FACTORIES.get(spec.name)
    if factory is None:
        detail = f"task {spec.name!r} is not known; known tasks: {', '.join(TASKS)}"
        raise BadInput(detail, errors=[FieldError("/task/name", detail)])
    return factory(spec.params, seed)


def check_task(spec: TaskSpec) -> None:
    """Raises BadInput as `load_task` does, and for a task without a first prompt. Draws nothing beyond that one."""
    load_task(spec, 0).train(0)
