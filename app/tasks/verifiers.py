"""Environments of the `verifiers` package (0.4, `verifiers.v1`) as tasks.

An environment of that package is a program that asks its agent for turns. Here the agent is a script: an environment is
run from its beginning with the turns that the policy has written so far, and stops where it asks for one more. So no
model client, harness or server of the package is started, and nobody keeps a state.

Invariant: what can't be had that way (tools, containers, judges, more than one agent) is refused when the task is
loaded, never scored as something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Self

from pydantic import JsonValue

from app.protocol.errors import BadInput, TaskFailed
from app.tasks.base import Prompt, Reply, Split, is_heldout
from app.tasks.names import wrong_params

DEFAULT_SIZE = 1000
MAX_SIZE = 1_000_000
PARAMS = ("taskset", "env", "config", "size")


class _Asked(BaseException):
    """The environment asks for a turn that was not written yet. None may catch it, so it is no Exception."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__("one more turn")
        self.words = words


class VerifiersTask:
    """`MultiTurnTask` over one environment; its tasks are told apart, and split, by the text of their prompts."""

    deterministic = True

    def __init__(self, package: _Package, env: Any, size: int) -> None:
        self._package, self._env = package, env
        self._lock = threading.Lock()
        self.name = f"verifiers/{env.config.env_id}"
        self._rows: dict[Split, list[tuple[str, Any]]] = {"train": [], "heldout": []}
        seen: set[str] = set()
        for task in itertools.islice(env.taskset, size):
            _check(task, package)
            text = self._opening(task)
            if text not in seen:
                seen.add(text)
                self._rows["heldout" if is_heldout(text) else "train"].append((text, task))

    @classmethod
    def from_params(cls, params: Mapping[str, JsonValue], seed: int) -> Self:
        """Build from `{"taskset": id, "env": id or null, "config": {…}, "size": tasks at most}`. Raises BadInput."""
        for key in params:
            if key not in PARAMS:
                raise wrong_params(f"/{key}", f"{key!r} is not a parameter of verifiers; known: {', '.join(PARAMS)}")
        taskset, env, config = params.get("taskset"), params.get("env") or "", params.get("config") or {}
        if not isinstance(taskset, str) or not taskset:
            raise wrong_params("/taskset", "taskset is required: the id of an installed taskset")
        if not isinstance(env, str) or not isinstance(config, dict):
            raise wrong_params("", "env must be an id, config an object")
        size = params.get("size", DEFAULT_SIZE)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
            raise wrong_params("/size", f"size {size!r} must be a whole number from 1 to {MAX_SIZE}")
        package = _Package()
        return cls(package, package.environment(taskset, env, config), size)

    @property
    def train_size(self) -> int:
        """Number of training tasks."""
        return len(self._rows["train"])

    @property
    def heldout_size(self) -> int:
        """Number of held-out tasks."""
        return len(self._rows["heldout"])

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises BadInput when there is none."""
        return self._prompt("train", index)

    def heldout(self, index: int) -> Prompt:
        """Held-out prompt number `index`. Raises BadInput when there is none."""
        return self._prompt("heldout", index)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        """What the environment says next; None when it asks for nothing more."""
        try:
            self._play(prompt.entry["task"], turns, to_the_end=False)
        except _Asked as asked:
            return Reply("\n\n".join(asked.words))
        return None

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """Of an episode of one turn."""
        return self.episode_reward(prompt, [completion_text])

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        """The sum of the weighted rewards. Raises TaskFailed if the environment gives none."""
        trace = self._play(prompt.entry["task"], turns, to_the_end=True)
        given = [reward for reward in trace.rewards.values() if reward is not None]
        if not given:
            raise TaskFailed(f"{self.name} gave no reward")
        return float(trace.reward)

    def _prompt(self, split: Split, index: int) -> Prompt:
        rows = self._rows[split]
        if not 0 <= index < len(rows):
            raise BadInput(f"{self.name} has {len(rows)} {split} prompts; there is no number {index}")
        text, task = rows[index]
        return Prompt(index, text, {"task": task})

    def _opening(self, task: Any) -> str:
        """What the policy reads first: the system prompt, and the first words of task or environment."""
        try:
            self._play(task, [], to_the_end=False)
        except _Asked as asked:
            system = task.data.system_prompt
            return "\n\n".join([*([system] if system else []), *asked.words])
        raise wrong_params("/env", f"{self.name} never asks its agent for anything")

    def _play(self, task: Any, turns: Sequence[str], *, to_the_end: bool) -> Any:
        """The trace of an episode with these turns. Raises _Asked if it wants more, unless `to_the_end`: then it is
        told that the agent has ended."""
        agent = _Scripted(self._package, turns, to_the_end=to_the_end)
        (seat,) = self._package.seats(self._env.config)
        with self._lock:
            asyncio.run(self._run(task, agent, SimpleNamespace(**{seat: agent})))
        if len(agent.traces) != 1:
            raise TaskFailed(f"{self.name} ran its agent {len(agent.traces)} times; once is what can be trained on")
        return agent.traces[0]

    async def _run(self, task: Any, agent: _Scripted, agents: Any) -> None:
        await self._env.setup(agents)
        await self._env.run(task, agents)
        await self._env.finalize(task, self._package.episode(self._env, task, agent.traces))


class _Scripted:
    """An agent whose turns are known. `trainable` is for environments to set."""

    def __init__(self, package: _Package, turns: Sequence[str], *, to_the_end: bool) -> None:
        self._package = package
        self._left = iter(turns)
        self._to_the_end = to_the_end
        self.traces: list[Any] = []
        self.trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        """One turn on the task's prompt, scored."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Interaction]:
        """Several turns; scored when the block ends."""
        trace = self._package.trace(task)
        yield _Interaction(self._package, trace, self._left, to_the_end=self._to_the_end)
        trace.stop("user_closed")
        await task.score(trace)
        self.traces.append(trace)


class _Interaction:
    """What an environment talks to."""

    def __init__(self, package: _Package, trace: Any, left: Iterator[str], *, to_the_end: bool) -> None:
        self.trace = trace
        self._package, self._left, self._to_the_end = package, left, to_the_end

    async def turn(self, message: Any = None) -> Any:
        """The next turn of the script. Raises _Asked at its end."""
        words = self._package.hear(self.trace, message)
        written = next(self._left, None)
        if written is not None:
            return self._package.say(self.trace, written)
        if not self._to_the_end:
            raise _Asked(words)
        return self._package.ended()


class _Package:
    """The calls of the package that are made, in one place. Raises BadInput if it is not installed."""

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
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise wrong_params("", f"{env or taskset}: {type(error).__name__}: {error}"[:1000]) from error
        seats = self.seats(made.config)
        if len(seats) != 1:
            raise wrong_params("/env", f"{env or taskset} has the agents {', '.join(seats)}; one can be trained")
        if made.taskset.toolsets(made.taskset.config):
            raise wrong_params("/taskset", f"{taskset} has tool servers, which are not run here")
        return made

    def seats(self, config: Any) -> list[str]:
        """Names of an environment's agents."""
        return list(self._module("configs.agent").agent_config_fields(config))

    def trace(self, task: Any) -> Any:
        """An empty record of an agent's work on a task."""
        module = self._module("trace")
        agent = module.AgentInfo(config=self._vf.AgentConfig())
        trace = module.Trace(task=self._told(task), agent=agent)
        if task.data.system_prompt:
            self._add(trace, self._vf.SystemMessage(content=task.data.system_prompt), sampled=False)
        return trace

    def episode(self, env: Any, task: Any, traces: Sequence[Any]) -> Any:
        """A finished episode."""
        made = self._vf.Episode(env=self._vf.EnvInfo(id=env.config.env_id), task=self._told(task))
        made.traces.extend(traces)
        return made

    def hear(self, trace: Any, message: Any) -> list[str]:
        """Record what the agent is told, by default the task's prompt, and return it as texts."""
        prompt = trace.task.data.prompt if message is None else message
        told = [prompt] if isinstance(prompt, str) else list(prompt or [])
        words = []
        for part in told:
            text = part if isinstance(part, str) else self._module("types").content_text(_content(part))
            self._add(trace, self._vf.UserMessage(content=text), sampled=False)
            words.append(text)
        return words

    def say(self, trace: Any, text: str) -> Any:
        """Record a turn of the agent and return it as a segment."""
        message = self._vf.AssistantMessage(content=text)
        self._add(trace, message, sampled=True)
        return self._vf.Segment(messages=[message])

    def ended(self) -> Any:
        """The segment of an agent that has ended."""
        return self._vf.Segment(messages=[], terminated=True)

    def base(self) -> Any:
        """The class of their tasks."""
        return self._vf.Task

    def _told(self, task: Any) -> Any:
        return self._module("trace").TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)

    def _add(self, trace: Any, message: Any, *, sampled: bool) -> None:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(self._vf.MessageNode(parent=parent, message=message, sampled=sampled))

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"verifiers.v1.{name}")


def _content(message: Any) -> Any:
    return message.get("content") if isinstance(message, Mapping) else message.content


def _check(task: Any, package: _Package) -> None:
    """Raises BadInput for a task that needs what is not here."""
    kind, base = type(task), package.base()
    needs = []
    if kind.NEEDS_CONTAINER:
        needs.append("a container")
    needs += [
        f"a runtime for {hook}()" for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(base, hook)
    ]
    if kind.toolsets(task.config):
        needs.append("tool servers")
    if task.config.judges:
        needs.append("a judge model")
    rewards = task.hooks("reward")
    needs += [f"a runtime for the reward {hook.__name__}" for hook in rewards if _needs_runtime(hook)]
    if needs:
        raise wrong_params("/taskset", f"tasks of {kind.__name__} need {', '.join(needs)}, which is not to be had here")


def _needs_runtime(hook: Any) -> bool:
    found = inspect.signature(hook).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty
