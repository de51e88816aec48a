"""The few calls of `verifiers.v1` (0.4.0) that our adapter and the environments beside this file make.

The package itself brings a hundred others. What this one does is held against it: `make test-extras` runs the tests
that use it with the package installed, which `install` then leaves alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentConfig(_Config):
    harness: Any = None
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None


class TaskConfig(_Config):
    judges: list[Any] = []


class TasksetConfig(_Config):
    id: str = ""
    task: TaskConfig = TaskConfig()


class EnvConfig(_Config):
    id: str = ""
    taskset: Any = None

    @property
    def env_id(self) -> str:
        return f"{self.id}+{self.taskset.id}" if self.id else str(self.taskset.id)

    def agent_harnesses(self) -> dict[str, Any]:
        return {name: types.SimpleNamespace(id="bash") for name in agent_config_fields(self)}


class State(BaseModel):
    pass


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)
    idx: int | None = None
    prompt: Any = None
    system_prompt: str | None = None
    image: str | None = None
    agent_user: str | None = None
    skills: list[Any] = []
    artifacts: list[Any] = []


class SystemMessage(BaseModel):
    role: str = "system"
    content: str


class UserMessage(BaseModel):
    role: str = "user"
    content: str


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str


class MessageNode(BaseModel):
    parent: int | None = None
    message: Any
    sampled: bool = False


class Segment:
    def __init__(self, messages: Sequence[Any], terminated: bool = False) -> None:
        self.messages, self.terminated = messages, terminated

    @property
    def last_reply(self) -> str:
        return str(self.messages[-1].content).strip() if self.messages else ""


class TraceTask(BaseModel):
    type: str
    data: Any
    key: str | None = None
    hash: str | None = None


class AgentInfo(BaseModel):
    config: AgentConfig
    name: str = "agent"
    trainable: bool = True


class EnvInfo(BaseModel):
    id: str


class Reward(BaseModel):
    score: float
    weight: float


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    nodes: list[MessageNode] = Field(default_factory=list)
    rewards: dict[str, Reward | None] = Field(default_factory=dict)
    state: State = Field(default_factory=State)
    stop_condition: str | None = None
    ok: bool = False

    @property
    def reward(self) -> float:
        return sum(r.score * r.weight for r in self.rewards.values() if r is not None)

    @property
    def num_turns(self) -> int:
        return sum(node.sampled for node in self.nodes)

    @property
    def last_reply(self) -> str:
        said = [node.message.content for node in self.nodes if node.sampled]
        return str(said[-1]).strip() if said else ""

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = Reward(score=value, weight=weight)

    def stop(self, condition: str) -> None:
        self.stop_condition = self.stop_condition or condition


class RolloutLimits(BaseModel):
    max_turns: int | None = None


class RolloutSession:
    def __init__(self, ctx: Any, trace: Trace, trace_stops: Sequence[Any], limits: RolloutLimits) -> None:
        self._trace, self._limits = trace, limits

    async def refused(self) -> str | None:
        most = self._limits.max_turns
        return "max_turns" if most is not None and self._trace.num_turns >= most else None


class Episode(BaseModel):
    env: EnvInfo
    task: TraceTask
    traces: list[Trace] = Field(default_factory=list)


def reward(function: Any = None, *, weight: float = 1.0) -> Any:
    def mark(wrapped: Any) -> Any:
        wrapped.reward, wrapped._vf_weight = True, weight
        return wrapped

    return mark if function is None else mark(function)


class Task(Generic[A, B, C]):
    NEEDS_CONTAINER = False
    hash = key = "0"

    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, config or TaskConfig()

    async def setup(self, trace: Any, runtime: Any) -> None: ...

    async def finalize(self, trace: Any, runtime: Any) -> None: ...

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    def hooks(self, kind: str) -> list[Callable[..., Any]]:
        found = (getattr(self, name) for name in dir(type(self)) if name not in ("hash", "key"))
        return [hook for hook in found if getattr(hook, kind, False) is True]

    async def score(self, trace: Trace) -> None:
        import inspect

        for hook in self.hooks("reward"):
            given = {"task": self.data, "trace": trace}
            value = await hook(**{name: given[name] for name in inspect.signature(hook).parameters})
            trace.record_reward(hook.__name__, value, hook._vf_weight)  # type: ignore[attr-defined]


class Taskset(Generic[A, B]):
    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self) -> Any:
        raise TypeError("a taskset loads")

    def toolsets(self, config: Any) -> list[Any]:
        return []

    def __iter__(self) -> Iterator[Any]:
        for index, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": index})
            yield task


class Env(Generic[A]):
    def __init__(self, config: Any) -> None:
        module = _module(config.taskset.id)
        self.config, self.taskset = config, _class(module, Taskset)(config.taskset)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def setup(self, agents: Any) -> None: ...

    async def finalize(self, task: Any, episode: Any) -> None: ...


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class SingleAgentEnv(Env[SingleAgentEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)


def agent_config_fields(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config if isinstance(value, AgentConfig)}


def state_cls(kind: type) -> type[State]:
    return State


def discover_decorated(task: Any, attribute: str) -> list[Any]:
    return []


def content_text(content: Any) -> str:
    return str(content)


def _module(name: str) -> Any:
    return importlib.import_module(name.replace("-", "_"))


def _class(module: Any, base: type) -> Any:
    return next(o for o in (getattr(module, n) for n in module.__all__) if isinstance(o, type) and issubclass(o, base))


def _config_of(kind: Any, base: type) -> Any:
    arguments = [a for origin in getattr(kind, "__orig_bases__", ()) for a in get_args(origin)]
    return next((a for a in arguments if isinstance(a, type) and issubclass(a, base)), base)


def _env_class(module: Any) -> Any:
    try:
        return _class(module, Env)
    except StopIteration:
        return SingleAgentEnv


def resolve_env_config(data: dict[str, Any]) -> Any:
    module = _module(data["taskset"]["id"])
    taskset = _config_of(_class(module, Taskset), TasksetConfig).model_validate(data["taskset"])
    return _config_of(_env_class(module), EnvConfig).model_validate({**data, "taskset": taskset})


def load_environment(config: Any) -> Any:
    return _env_class(_module(config.taskset.id))(config)


def install() -> None:
    """Take the package's place, unless it is there."""
    if importlib.util.find_spec("verifiers") is not None:
        return
    here = sys.modules[__name__]
    package = types.ModuleType("verifiers")
    package.v1 = here  # type: ignore[attr-defined]
    sys.modules.update({"verifiers": package, "verifiers.v1": here})
    for name in ("utils.loaders", "utils.decorators", "configs.agent", "session", "state", "trace", "types"):
        sys.modules[f"verifiers.v1.{name}"] = here
