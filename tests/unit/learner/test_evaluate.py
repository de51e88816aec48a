"""Held-out reward of a task with several turns, and of one whose rewards fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.learner.evaluate import Evaluator
from app.learner.model import LoadedModel, load
from app.learner.tiny import tiny_model
from app.protocol.errors import TaskFailed
from app.tasks.base import Prompt, Reply
from tests.unit.learner.samples import job

CACHE = Path(__file__).parents[3] / ".echo2" / "test-cache"


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load(tiny_model(CACHE))


class Talk:
    """Keeps the longest conversation on each prompt; `turns` at most."""

    name, train_size, heldout_size = "talk", 1, 16

    def __init__(self, turns: int, failing: Sequence[int] = ()) -> None:
        self.turns, self.failing = turns, failing
        self.heard: dict[int, list[str]] = {}

    def heldout(self, index: int) -> Prompt:
        return Prompt(index, f"Spell this word backward (example: sun -> nus): {'abcdefghijklmnop'[index]}bc", {})

    train = heldout

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        return Reply(f" {len(turns)}") if len(turns) < self.turns else None

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        return self.episode_reward(prompt, [completion_text])

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        if prompt.index in self.failing:
            raise TaskFailed("it took longer than 1 s")
        self.heard[prompt.index] = list(turns)
        return float(len(turns))


def evaluated(tiny: LoadedModel, task: Any, max_tokens: int = 40) -> float:
    spec = job(sampling={"max_tokens": max_tokens}, learner={"eval_prompts": 16})
    return Evaluator(tiny.model, tiny.tokenizer, task, spec).run()


def test_an_episode_is_played_to_its_end_and_the_first_turn_is_that_of_one_turn(tiny: LoadedModel):
    one, three = Talk(1), Talk(3)
    assert evaluated(tiny, one) == 1.0
    assert evaluated(tiny, three) > 2.5
    assert {index: turns[0] for index, turns in three.heard.items()} == {i: t[0] for i, t in one.heard.items()}
    assert {len(turns) for turns in three.heard.values()} >= {3}


def test_an_episode_ends_where_no_word_more_fits(tiny: LoadedModel):
    long, short = Talk(99), Talk(99)
    assert evaluated(tiny, long, 60) > evaluated(tiny, short, 16) > 1.0


def test_answers_that_can_not_be_scored_are_left_out_and_all_of_them_are_an_error(tiny: LoadedModel):
    assert evaluated(tiny, Talk(1, failing=range(8))) == 1.0
    with pytest.raises(TaskFailed, match="not one of 16 held-out answers"):
        evaluated(tiny, Talk(1, failing=range(16)))
