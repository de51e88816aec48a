"""From what was sampled to a reward, the same on nodes and on the learner's side.

Invariant: a reward is finite or an error; turns of a multi-turn task are told apart by who wrote them alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from app.protocol.errors import BadInput, TaskFailed
from app.tasks.base import Prompt, Task, is_multi_turn
from app.tasks.prompts import decode, encode_reply


def turns_of(tokenizer: Any, completion_ids: Sequence[int], generated: Sequence[bool] | None) -> list[str]:
    """The texts that the policy wrote, one a turn: runs of tokens that it generated. `generated` None: all of them."""
    if generated is None:
        return [decode(tokenizer, completion_ids)]
    pairs = zip(completion_ids, generated, strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [decode(tokenizer, [token for token, _ in run]) for written, run in runs if written]


def reply_of(
    task: Task, prompt: Prompt, tokenizer: Any, completion_ids: Sequence[int], generated: Sequence[bool] | None
) -> list[int] | None:
    """Token ids that the environment puts behind a turn which the policy has ended; None when the episode is over.

    Raises BadInput for a reply without tokens, and whatever the task raises.
    """
    if not is_multi_turn(task):
        return None
    reply = task.respond(prompt, turns_of(tokenizer, completion_ids, generated))
    return None if reply is None else encode_reply(tokenizer, reply.text, completion_ids[-1])


def reward_of_turns(task: Task, prompt: Prompt, turns: Sequence[str]) -> float:
    """The reward of what the policy wrote. Raises TaskFailed if it is not finite, BadInput for turns
    that the task does not have, and whatever the task raises."""
    if is_multi_turn(task):
        reward = task.episode_reward(prompt, turns)
    elif len(turns) == 1:
        reward = task.reward(prompt, turns[0])
    else:
        raise BadInput(f"{task.name} has one turn, but there are {len(turns)}")
    number = float(reward)
    if not math.isfinite(number):
        raise TaskFailed(f"the task's reward is not finite: {number}")
    return number


def reward_of(
    task: Task, prompt: Prompt, tokenizer: Any, completion_ids: Sequence[int], generated: Sequence[bool] | None
) -> float:
    """The reward of one rollout, from its tokens and its marks of who wrote them."""
    return reward_of_turns(task, prompt, turns_of(tokenizer, completion_ids, generated))
