"""Environments of the `verifiers` package (0.4, `verifiers.v1`) as tasks.

An environment of that package is a program that asks its agent for turns. Here the agent is a script: an environment is
run from its beginning with the turns that the policy has written so far, and stops where it asks for one more. So no
model client, harness or server of the package is started, and nobody keeps a state.

Invariant: what can't be had that way (`app/tasks/verifiers_package.py`) is refused when the task is loaded, or fails;
it is never scored as something else.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

from pydantic import JsonValue

from app.protocol.errors import BadInput, TaskFailed
from app.tasks.base import Prompt, Reply, Split, is_heldout
from app.tasks.names import wrong_params
from app.tasks.verifiers_agent import Asked, ScriptedAgent
from app.tasks.verifiers_package import Package

DEFAULT_SIZE = 1000
MAX_SIZE = 1_000_000
PARAMS = ("taskset", "env", "config", "size")


class _SeveralRuns(TaskFailed):
    """The environment runs its agent more than once."""


class VerifiersTask:
    """`MultiTurnTask` over one environment; its tasks are told apart, and split, by the text of their prompts."""

    deterministic = True

    def __init__(self, package: Package, env: Any, size: int) -> None:
        self._package, self._env = package, env
        self._lock = threading.Lock()
        self.name = f"verifiers/{env.config.env_id}"
        self._rows: dict[Split, list[tuple[str, Any]]] = {"train": [], "heldout": []}
        seen: set[str] = set()
        for task in itertools.islice(env.taskset, size):
            package.check(task)
            try:
                text = self._opening(task)
                if not seen:
                    self._try_out(task)
            except TaskFailed as error:
                raise wrong_params("/taskset", error.detail) from error
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
        package = Package()
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
        """What the environment says next; None when it asks for nothing more. Raises TaskFailed."""
        asked = self._play(prompt.entry["task"], turns, to_the_end=False).asked
        return None if asked is None else Reply("\n\n".join(asked))

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """Of an episode of one turn."""
        return self.episode_reward(prompt, [completion_text])

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        """The sum of the weighted rewards. Raises TaskFailed if the environment gives none."""
        traces = self._play(prompt.entry["task"], turns, to_the_end=True).traces
        if len(traces) != 1:
            raise TaskFailed(f"{self.name} has not run its agent to an end")
        if not any(reward is not None for reward in traces[0].rewards.values()):
            raise TaskFailed(f"{self.name} gave no reward")
        return float(traces[0].reward)

    def _prompt(self, split: Split, index: int) -> Prompt:
        rows = self._rows[split]
        if not 0 <= index < len(rows):
            raise BadInput(f"{self.name} has {len(rows)} {split} prompts; there is no number {index}")
        text, task = rows[index]
        return Prompt(index, text, {"task": task})

    def _opening(self, task: Any) -> str:
        """What the policy reads first: the system prompt, and the first words of task or environment.

        Raises BadInput, TaskFailed.
        """
        asked = self._play(task, [], to_the_end=False).asked
        if asked is None:
            raise wrong_params("/env", f"{self.name} never asks its agent for anything")
        system = task.data.system_prompt
        return "\n\n".join([*([system] if system else []), *asked])

    def _try_out(self, task: Any) -> None:
        """Raises TaskFailed if a second run of the agent begins where the first has ended."""
        try:
            self._play(task, [""], to_the_end=True)
        except _SeveralRuns:
            raise
        except TaskFailed:
            # It may well refuse to score an empty answer.
            return

    def _play(self, task: Any, turns: Sequence[str], *, to_the_end: bool) -> ScriptedAgent:
        """The agent of an episode with these turns, which was asked for one more, or has ended. Raises TaskFailed."""
        agent = ScriptedAgent(self._package, self._env, turns, to_the_end=to_the_end)
        failed: BaseException | None = None
        with self._lock:
            try:
                asyncio.run(self._run(task, agent))
            except (Exception, Asked, BaseExceptionGroup) as error:  # noqa: BLE001 - the environment is anybody's code
                failed = error
        if agent.runs > 1:
            raise _SeveralRuns(f"{self.name} runs its agent {agent.runs} times; once is what can be trained on")
        if failed is not None and agent.asked is None:
            raise TaskFailed(f"{self.name}: {type(failed).__name__}: {failed}"[:1000]) from failed
        return agent

    async def _run(self, task: Any, agent: ScriptedAgent) -> None:
        agents = SimpleNamespace(**{agent.name: agent})
        await self._env.setup(agents)
        await self._env.run(task, agents)
        if agent.asked is None:
            await self._env.finalize(task, self._package.episode(self._env, task, agent.traces))
