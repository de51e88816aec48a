"""A task made in this very process. For plug-ins that process is a sandbox's.

Invariant: what is made has everything that a task needs; what can't be made is a BadInput that names the reason.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from app.protocol.task_spec import TaskSpec
from app.tasks.base import Task
from app.tasks.names import entry_point, file_name, unknown, wrong_name, wrong_params

Factory = Callable[[Mapping[str, JsonValue], int], Task]
_NONE = object()
MEMBERS = ("name", "train_size", "heldout_size", "train", "heldout", "reward")


def build(spec: TaskSpec, seed: int, folder: str | Path | None = None) -> Task:
    """The task of a spec. `folder` holds its files, if it has any. Raises BadInput, and whatever a plug-in raises."""
    here = None if folder is None else Path(folder)
    # What is heavy is imported by the task that needs it.
    match spec.name:
        case "reasoning_gym":
            from app.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask.from_params(spec.params, seed)
        case "jsonl":
            from app.tasks.jsonl import JsonlTask

            return JsonlTask.from_params(spec.params, seed, here)
        case "poker":
            from app.tasks.poker import PokerTask

            return PokerTask.from_params(spec.params, seed)
        case "verifiers":
            from app.tasks.verifiers import VerifiersTask

            return VerifiersTask.from_params(spec.params, seed)
    return _plugin(spec, seed, here)


def _plugin(spec: TaskSpec, seed: int, folder: Path | None) -> Task:
    named = file_name(spec.name)
    if named is not None:
        if folder is None:
            raise wrong_name(f"the source of {spec.name} is not here")
        factory = _from_file(folder / "source.py", named.attribute, spec.name)
    else:
        point = entry_point(spec.name)
        if point is None:
            raise unknown(spec.name)
        factory = _from_point(point)
    if not callable(factory):
        raise wrong_name(f"{spec.name} is not a class or function that takes (params, seed)")
    try:
        task = factory(dict(spec.params), seed)
    except (TypeError, ValueError, KeyError) as error:
        raise wrong_params("", f"{spec.name} refuses its parameters: {type(error).__name__}: {error}"[:1000]) from error
    # Looked up without being computed: counting the prompts may take long.
    missing = [member for member in MEMBERS if inspect.getattr_static(task, member, _NONE) is _NONE]
    if hasattr(task, "respond") and not hasattr(task, "episode_reward"):
        missing.append("episode_reward")
    if missing:
        raise wrong_name(f"what {spec.name} makes is no task: it has no {', '.join(missing)}")
    made: Task = task
    return made


def _from_file(path: Path, attribute: str, name: str) -> Any:
    """An attribute of a source file, whose module keeps no name that another import could find by chance."""
    module_spec = importlib.util.spec_from_file_location("echo2_task_source", path)
    if module_spec is None or module_spec.loader is None or not path.is_file():
        raise wrong_name(f"the source of {name} is not here")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses look their module up.
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise wrong_name(f"{name} can't be imported: {type(error).__name__}: {error}"[:1000]) from error
    if not hasattr(module, attribute):
        raise wrong_name(f"{name.partition(':')[0]} has no {attribute}")
    return getattr(module, attribute)


def _from_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (SyntaxError, ImportError, AttributeError) as error:
        detail = f"the plug-in {point.name} ({point.value}) can't be imported: {type(error).__name__}: {error}"
        raise wrong_name(detail[:1000]) from error
