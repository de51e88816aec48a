"""Rewards computed again for an audit: each in its own time, and never taken for right when they are not known."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch

from app.learner.audit.bounded import MOST_HUNG, Bounded
from app.learner.audit.rewards import TIMEOUT_S, Rewards, patience_s
from app.learner.buffer import Group
from app.protocol.errors import TaskFailed
from app.tasks.base import Prompt
from app.tasks.sandbox import SandboxTask
from tests.unit.learner.audit.samples import sampled, sharper, told

WAIT_S = 20.0
LIMIT_S = 1.0
"""For what is meant to hang; nothing else comes near it."""


class Sums:
    """The reward of an answer is the sum of its tokens; `before` is called first."""

    name = "sums"
    train_size = heldout_size = 10
    deterministic = True

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.before = before
        self.prompts = True

    def train(self, index: int) -> Prompt:
        if not self.prompts:
            raise TaskFailed("it has no prompts today")
        return Prompt(index, "?", {})

    heldout = train

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        total = sum(map(int, completion_text.split()))
        self.before(total)
        return float(total)


class Words:
    """Token 7 is "7 "."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(f"{i} " for i in ids)


def answers(*totals: int, right: bool = True) -> Group:
    """Answers of one token with these rewards."""
    (made,) = sampled(sharper(), ["a"], torch.Generator().manual_seed(1), size=len(totals))
    rows = zip(made.rollouts, totals, strict=True)
    return dataclasses.replace(
        made,
        rollouts=tuple(
            dataclasses.replace(r, completion_ids=[n], logprobs=[-1.0], reward=n + (0.0 if right else 1.0))
            for r, n in rows
        ),
    )


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """What hangs until the end of a test waits for."""
    event = threading.Event()
    yield event
    event.set()


def test_rewards_are_held_against_those_computed_again():
    rewards = Rewards(Sums(), Words())
    good = answers(3, 4, 5)
    assert rewards.off(good) == 0
    lie = told(good, reward=lambda r: r.reward + (r.sample_index == 1) * 1e-3)
    assert rewards.off(lie) == pytest.approx(1e-3 / 4.001, rel=1e-3)
    rewards.close()


def test_nobody_is_held_to_a_reward_that_differs_from_call_to_call():
    task = Sums()
    task.deterministic = False
    rewards = Rewards(task, Words())
    assert rewards.off(answers(3, 4, right=False)) is None
    rewards.close()


def test_a_task_that_fails_here_leaves_rewards_unknown():
    def before(total: int) -> None:
        raise RuntimeError("no database here")

    rewards = Rewards(Sums(before), Words())
    with pytest.raises(TaskFailed, match="no database here"):
        rewards.off(answers(3, 4))
    with pytest.raises(TaskFailed, match="no database here"):
        rewards.off(answers(3, 4, right=False))
    rewards.close()


def test_a_prompt_that_fails_here_leaves_rewards_unknown():
    task = Sums()
    task.prompts = False
    rewards = Rewards(task, Words())
    with pytest.raises(TaskFailed, match="its prompt failed: it has no prompts today"):
        rewards.off(answers(3))
    task.prompts = True
    assert rewards.off(answers(3)) == 0
    rewards.close()


def test_the_answers_of_a_group_are_computed_side_by_side():
    all_four = threading.Barrier(4, timeout=WAIT_S)
    rewards = Rewards(Sums(lambda _: all_four.wait() and None), Words(), at_once=4)
    assert rewards.off(answers(3, 4, 5, 6)) == 0
    rewards.close()


def test_no_more_than_were_asked_for_run_side_by_side():
    lock, running, most = threading.Lock(), [0], [0]
    two = threading.Barrier(2, timeout=WAIT_S)

    def before(total: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        two.wait()
        with lock:
            running[0] -= 1
        two.wait()

    rewards = Rewards(Sums(before), Words(), at_once=2)
    assert rewards.off(answers(*range(3, 11))) == 0
    assert most[0] == 2
    rewards.close()


def test_each_call_has_its_own_time_however_many_there_are():
    now = [0.0]

    def call() -> float:
        now[0] += 8.0
        return now[0]

    bounded = Bounded(1, 10.0, clock=lambda: now[0])
    assert bounded.run([call] * 8) == [8.0 * n for n in range(1, 9)]
    bounded.close()


def test_a_reward_that_hangs_here_holds_nobody_up_and_keeps_no_other_from_being_found_wrong(go: threading.Event):
    rewards = Rewards(Sums(lambda total: go.wait(WAIT_S) and None if total == 9 else None), Words(), timeout_s=LIMIT_S)
    with pytest.raises(TaskFailed, match=r"1 of 2 .* takes longer than 1 s"):
        rewards.off(answers(9, 3))
    assert rewards.off(answers(3, 4)) == 0
    assert rewards.off(answers(3, 4, right=False)) == pytest.approx(1 / 4)
    rewards.close()


def test_one_answer_that_hangs_excuses_no_lie_in_another(go: threading.Event):
    rewards = Rewards(Sums(lambda total: go.wait(WAIT_S) and None if total == 9 else None), Words(), timeout_s=LIMIT_S)
    assert rewards.off(answers(9, 3, right=False)) == pytest.approx(1 / 4)
    rewards.close()


def test_with_too_many_that_hang_no_other_is_begun_until_some_have_ended(go: threading.Event):
    bounded = Bounded(MOST_HUNG, LIMIT_S)
    found = bounded.run([lambda: go.wait(WAIT_S)] * (2 * MOST_HUNG + 1))
    said = [one.detail for one in found if isinstance(one, TaskFailed)]
    assert said[:MOST_HUNG] == ["takes longer than 1 s"] * MOST_HUNG
    assert said[-1] == f"is not begun: {MOST_HUNG} others hang"
    go.set()
    assert not wait(bounded._hung, WAIT_S).not_done
    assert bounded.run([lambda: 7]) == [7]
    bounded.close()


def test_an_answer_has_as_long_as_its_task_says_and_as_it_may_wait_for_a_process():
    pool = SimpleNamespace(longest_call_s=100.0, close=lambda: None)
    assert patience_s(SandboxTask(pool, {"name": "t"})) == 500.0  # type: ignore[arg-type]
    assert patience_s(Sums()) == TIMEOUT_S == 60.0
