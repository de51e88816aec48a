"""What is said of a reward that could not be computed."""

from __future__ import annotations

import threading

import pytest

from app.protocol.work import WorkItem
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.groups import Group
from app.rollout_agent.text_side import TextSide, score
from app.tasks.base import Prompt
from tests.unit.rollout_agent.fakes import Echo, Letters, pool

DONE = Completion([65], [-0.5], "stop", (Span(0, 0),))


def group(index: int) -> Group:
    item = WorkItem(id=f"w{index}", prompt_index=index, group_size=2, seed=0, deadline_s=60)
    return Group(item, Prompt(index, "p", {}), [1], 1060.0, [DONE, DONE])


async def test_a_reward_that_takes_too_long_says_so_and_keeps_no_other_from_its_own() -> None:
    go = threading.Event()

    class Slow(Echo):
        def reward(self, prompt: Prompt, completion_text: str) -> float:
            return float(prompt.index != 1 or go.wait(20))

    text = TextSide(Slow(), Letters())
    text.reward_timeout_s = 0.05
    with pool() as hanging, pool() as free:
        try:
            assert await score(text, [group(1)], hanging) == ({}, {"w1": "its reward took longer than 0.05 s"})
            assert await score(text, [group(2)], free) == ({"w2": [1.0, 1.0]}, {})
        finally:
            go.set()


@pytest.mark.parametrize(
    ("error", "said"), [(TimeoutError("no answer from the judge"), "TimeoutError('no answer from the judge')"),
                        (ZeroDivisionError(), "ZeroDivisionError()")],
)  # fmt: skip
async def test_what_a_task_raises_itself_is_told_as_it_is(error: Exception, said: str) -> None:
    with pool() as executor:
        assert await score(TextSide(Echo({1: error}), Letters()), [group(1)], executor) == ({}, {"w1": said})
