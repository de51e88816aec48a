"""The calls of the `verifiers` package (0.4, `verifiers.v1`) that are made, in one place.

Invariant: what an environment or a task needs and is not to be had here (tools, containers, harnesses, judges, counts
of tokens, more than one agent) is refused, never left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from pydantic import JsonValue

from app.protocol.errors import BadInput, TaskFailed
from app.tasks.names import wrong_params

HEARD = ("system", "user")
"""Roles of messages that become text of a prompt."""
_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
_NEEDS = {"image": "a container", "agent_user": "a container", "skills": "a harness", "artifacts": "a runtime"}


class Package:
    """Raises BadInput if it is not installed."""

    def __init__(self) -> None:
        try:
            self._vf: Any = importlib.import_module("verifiers.v1")
        except ImportError as error:
            detail = "task verifiers needs the package verifiers 0.4 on the service, the learner and the nodes"
            raise BadInput(f"{detail}: echo2[verifiers]") from error

    def environment(self, taskset: str, env: str, config: Mapping[str, JsonValue]) -> Any:
        """An environment by the ids of its parts. Raises BadInput."""
        loaders = self._module("utils.loaders")
        try:
            resolved = loaders.resolve_env_config({"id": env, "taskset": {**config, "id": taskset}})
            made = loaders.load_environment(resolved)
            seats = self._seats(made)
            needs = list(self._missing(made))
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise wrong_params("", f"{env or taskset}: {type(error).__name__}: {error}"[:1000]) from error
        if len(seats) != 1:
            raise wrong_params("/env", f"{env or taskset} has the agents {', '.join(seats)}; one can be trained")
        if needs:
            raise wrong_params("", f"{env or taskset} needs {', '.join(needs)}, which is not to be had here")
        return made

    def seat(self, env: Any) -> tuple[str, Any]:
        """Name and configuration of an environment's agent."""
        [(name, config)] = self._seats(env).items()
        return name, config

    def check(self, task: Any) -> None:
        """Raises BadInput for a task that needs what is not here."""
        kind, base = type(task), self._vf.Task
        needs = ["a container"] if kind.NEEDS_CONTAINER else []
        needs += [f"a runtime for {h}()" for h in ("setup", "finalize") if getattr(kind, h) is not getattr(base, h)]
        needs += [f"{what} ({field})" for field, what in _NEEDS.items() if getattr(task.data, field)]
        needs += ["tool servers"] if kind.toolsets(task.config) else []
        needs += ["a judge model"] if task.config.judges else []
        needs += [f"a runtime for the reward {h.__name__}" for h in task.hooks("reward") if _needs_runtime(h)]
        hooks = self._module("utils.decorators").discover_decorated(task, "intercept")
        hooks += [hook for hook, kind in self._stops(task) if kind is not self._module("trace").Trace]
        needs += [f"the model's calls for {hook.__name__}()" for hook in hooks]
        if needs:
            detail = f"tasks of {kind.__name__} need {', '.join(needs)}, which is not to be had here"
            raise wrong_params("/taskset", detail)

    def trace(self, task: Any, name: str, config: Any, *, trainable: bool) -> Any:
        """An empty record of an agent's work on a task."""
        module = self._module("trace")
        agent = module.AgentInfo(config=config, name=name, trainable=trainable)
        state = self._module("state").state_cls(type(task))()
        trace = module.Trace(task=self._told(task), agent=agent, state=state)
        if task.data.system_prompt:
            self._add(trace, self._vf.SystemMessage(content=task.data.system_prompt), sampled=False)
        return trace

    def session(self, task: Any, trace: Any, config: Any) -> Any:
        """What says, before each turn, whether a limit or a stop of the task has ended a run."""
        module = self._module("session")
        stops = [hook for hook, _ in self._stops(task)]
        limits = module.RolloutLimits(max_turns=config.max_turns)
        return module.RolloutSession(ctx=None, trace=trace, trace_stops=stops, limits=limits)

    def episode(self, env: Any, task: Any, traces: Sequence[Any]) -> Any:
        """A finished episode."""
        made = self._vf.Episode(env=self._vf.EnvInfo(id=env.config.env_id), task=self._told(task))
        made.traces.extend(traces)
        return made

    def hear(self, trace: Any, message: Any) -> list[str]:
        """Record what the agent is told, by default the task's prompt, and return it as texts. Raises TaskFailed."""
        told = trace.task.data.prompt if message is None else message
        words = []
        for part in [self._vf.UserMessage(content=told)] if isinstance(told, str) else told:
            typed = self._module("dialects").parse_message(part) if isinstance(part, dict) else part
            words.append(self._text(typed))
            self._add(trace, typed, sampled=False)
        return words

    def say(self, trace: Any, text: str) -> Any:
        """Record a turn of the agent and return it as a segment."""
        message = self._vf.AssistantMessage(content=text)
        self._add(trace, message, sampled=True)
        return self._vf.Segment(messages=[message])

    def ended(self) -> Any:
        """The segment of an agent that has ended."""
        return self._vf.Segment(messages=[], terminated=True)

    def _seats(self, env: Any) -> dict[str, Any]:
        return dict(self._module("configs.agent").agent_config_fields(env.config))

    def _missing(self, env: Any) -> Iterator[str]:
        """What an environment wants for itself, and can't have."""
        if env.taskset.toolsets(env.taskset.config):
            yield "tool servers"
        for hook in ("start", "stop"):
            if getattr(type(env), hook) is not getattr(self._vf.Env, hook):
                yield f"its {hook}(), which is not called"
        for name, harness in env.config.agent_harnesses().items():
            seat = self._seats(env)[name]
            # A program that acts: one that nobody has chosen is the package's own, whose tools a policy can do without.
            if harness.id != "null" and not (harness.id == "bash" and seat.harness is None):
                yield f"the harness {harness.id}"
            yield from (limit for limit in _TOKEN_LIMITS if getattr(seat, limit) is not None)

    def _stops(self, task: Any) -> list[tuple[Any, type]]:
        module = self._module("session")
        return [(hook, module.hook_boundary(hook, allow_trace=True)) for hook in task.hooks("stop")]

    def _text(self, message: Any) -> str:
        plain = isinstance(message.content, str) or all(part.type == "text" for part in message.content or [])
        if message.role not in HEARD or not plain:
            what = f"a message of the role {message.role}" if plain else "pictures"
            raise TaskFailed(f"its agent is told {what}; only texts of the roles {' and '.join(HEARD)} can be had here")
        return str(self._module("types").content_text(message.content))

    def _told(self, task: Any) -> Any:
        return self._module("trace").TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)

    def _add(self, trace: Any, message: Any, *, sampled: bool) -> None:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(self._vf.MessageNode(parent=parent, message=message, sampled=sampled))

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"verifiers.v1.{name}")


def _needs_runtime(hook: Any) -> bool:
    found = inspect.signature(hook).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty
