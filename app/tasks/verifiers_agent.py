"""An agent of the `verifiers` package whose turns are known beforehand.

Invariant: what the environment said when it asked for a turn that was not written yet is kept, whatever it does with
the exception that stops it then; a trace is finished only with its task's own rewards.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from app.tasks.verifiers_package import Package


class Asked(BaseException):
    """The environment asks for a turn that was not written yet. None should catch it, so it is no Exception."""


class ScriptedAgent:
    """What an environment takes for its agent. It knows `run` and `interaction`; what else it asks for is not there."""

    def __init__(self, package: Package, env: Any, turns: Sequence[str], *, to_the_end: bool) -> None:
        """`to_the_end`: behind the last turn it says that it has ended; else it raises Asked."""
        self._package, self._left, self._to_the_end = package, iter(turns), to_the_end
        self.name, self.config = package.seat(env)
        self.trainable = True
        """For environments to set."""
        self.asked: list[str] | None = None
        """What the environment said before it asked for one turn more than there are."""
        self.runs = 0
        self.traces: list[Any] = []
        """Of the runs that have ended, in order."""

    async def run(self, task: Any, *, on_trace: Callable[[Any], None] | None = None) -> Any:
        """One turn on the task's prompt, scored. The trace."""
        interaction = self._begin(task, on_trace)
        await interaction.turn()
        interaction.trace.stop("agent_completed")
        return await interaction.close()

    @contextlib.asynccontextmanager
    async def interaction(
        self, task: Any, *, on_trace: Callable[[Any], None] | None = None
    ) -> AsyncIterator[Interaction]:
        """Several turns; scored when the block ends."""
        interaction = self._begin(task, on_trace)
        yield interaction
        await interaction.close()

    def next_turn(self, words: list[str]) -> str | None:
        """The next turn of the script, None when it has ended. Raises Asked."""
        written = next(self._left, None)
        if written is None and not self._to_the_end:
            self.asked = self.asked or words
            raise Asked
        return written

    def _begin(self, task: Any, on_trace: Callable[[Any], None] | None) -> Interaction:
        self.runs += 1
        trace = self._package.trace(task, self.name, self.config, trainable=self.trainable)
        if on_trace is not None:
            on_trace(trace)
        return Interaction(self._package, self, task, trace)


class Interaction:
    """One run of an agent, as an environment talks to it."""

    def __init__(self, package: Package, agent: ScriptedAgent, task: Any, trace: Any) -> None:
        self.trace = trace
        self._package, self._agent, self._task = package, agent, task
        self._session = package.session(task, trace, agent.config)
        self._begun = self._over = self._closed = False

    async def turn(self, message: Any = None) -> Any:
        """The segment of the next turn; a `terminated` one when a limit or a stop of the task has ended the run.

        Raises Asked at the end of the script, RuntimeError and ValueError where the package does.
        """
        if self._closed or self._over:
            raise RuntimeError("the exchange is over")
        prompted = not self._begun and self.trace.task.data.prompt is not None
        if prompted != (message is None):
            raise ValueError("a task's prompt is opened by a bare turn(), every other turn needs a message")
        if await self._stopped():
            self._over = True
            return self._package.ended()
        self._begun = True
        written = self._agent.next_turn(self._package.hear(self.trace, message))
        if written is None:
            self._over = True
            return self._package.ended()
        return self._package.say(self.trace, written)

    async def close(self) -> Any:
        """End the run and have its task score it. The trace; a second call changes nothing."""
        if not self._closed:
            self._closed = True
            self.trace.stop("user_closed")
            await self._task.score(self.trace)
            self.trace.ok = True
            self._agent.traces.append(self.trace)
        return self.trace

    async def _stopped(self) -> bool:
        return self.trace.stop_condition is not None or await self._session.refused() is not None
