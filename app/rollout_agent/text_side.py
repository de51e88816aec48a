"""A task's text side: prompts to token ids, completions to rewards.

Invariant: a reward that could not be computed is never a number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from app.protocol.errors import EchoError, TaskFailed
from app.protocol.work import WorkItem
from app.rollout_agent.engines.base import Completion
from app.rollout_agent.episodes import Answer, answered
from app.rollout_agent.groups import Group
from app.rollout_agent.locked import LockedTokenizer
from app.tasks.base import Prompt, Task
from app.tasks.prompts import encode_prompt
from app.tasks.sandbox import SandboxTask
from app.tasks.scoring import reward_of

REWARD_TIMEOUT_S = 60.0


class TextSide:
    """Tokenizer and task: text ⇄ ids and rewards. May be used from several threads.

    `scores` False: rewards are somebody else's matter, and 0 here. `at_once`: rewards that are computed side by side.
    """

    def __init__(self, task: Task, tokenizer: Any, *, scores: bool = True, at_once: int = 4) -> None:
        self._task = task
        self._tokenizer = LockedTokenizer(tokenizer)
        self.scores = scores
        self.gate = asyncio.Semaphore(at_once)
        """Who holds it may compute one: its time then counts from when it really begins."""
        self.reward_timeout_s = task.longest_call_s if isinstance(task, SandboxTask) else REWARD_TIMEOUT_S

    def encode(self, items: Sequence[WorkItem]) -> tuple[list[Prompt], list[list[int]]]:
        """Prompts of the items, and their token ids. Raises BadInput for an index that the task does not have."""
        prompts = [
            (self._task.heldout if item.split == "heldout" else self._task.train)(item.prompt_index) for item in items
        ]
        return prompts, [encode_prompt(self._tokenizer, prompt) for prompt in prompts]

    @property
    def multi_turn(self) -> bool:
        """Whether the task has an environment that answers."""
        return hasattr(self._task, "respond")

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """What the task's environment makes of an episode after this prompt; nothing, of a task with one turn."""

        def answer(episode: Completion) -> Completion:
            return answered(self._task, self._tokenizer, prompt, episode, max_tokens)

        return answer

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of a sample. Raises whatever the task raises, and TaskFailed for one that is not finite."""
        return reward_of(self._task, prompt, self._tokenizer, completion.token_ids, completion.generated)


async def score(
    text: TextSide, groups: Sequence[Group], pool: Executor
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Rewards by work item, and what went wrong by work item. All are computed concurrently, each with a timeout."""
    loop = asyncio.get_running_loop()

    async def reward(prompt: Prompt, completion: Completion) -> float:
        async with text.gate:
            try:
                async with asyncio.timeout(text.reward_timeout_s) as limit:
                    return await loop.run_in_executor(pool, text.reward, prompt, completion)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise TaskFailed(f"its reward took longer than {text.reward_timeout_s:g} s") from error

    async def one(group: Group) -> list[float]:
        if not text.scores:
            return [0.0] * len(group.finished)
        return list(await asyncio.gather(*(reward(group.prompt, sample) for sample in group.finished)))

    outcomes = await asyncio.gather(*(one(group) for group in groups), return_exceptions=True)
    rewards: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for group, outcome in zip(groups, outcomes, strict=True):
        if isinstance(outcome, Exception):
            # A task is a plug-in and may raise anything; its detail goes into the report.
            failed[group.item.id] = outcome.detail if isinstance(outcome, EchoError) else repr(outcome)[:500]
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            rewards[group.item.id] = outcome
    return rewards, failed
