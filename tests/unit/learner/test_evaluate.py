"""Held-out reward of a task with several turns, and of one whose rewards fail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.learner.evaluate import Evaluator, Sampler
from app.learner.model import LoadedModel, load
from app.learner.parallel.messages import Sampling
from app.learner.parallel.ranks import Alone, Op
from app.learner.sampling import eos_ids, sample
from app.learner.tiny import tiny_model
from app.protocol.errors import TaskFailed
from app.protocol.job import SamplingSpec
from app.tasks.base import Prompt, Reply
from app.tasks.prompts import decode, encode_prompt
from app.tasks.scoring import reply_of
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


def test_answers_are_drawn_at_the_temperature_of_the_job_as_nodes_draw_theirs(tiny: LoadedModel):
    heard = []
    for temperature in (1.0, 1e-4):
        task = Talk(1)
        spec = job(sampling={"max_tokens": 8, "temperature": temperature}, learner={"eval_prompts": 16})
        Evaluator(tiny.model, tiny.tokenizer, task, spec).run()
        heard.append([task.heard[i][0] for i in range(16)])
    prompts = [encode_prompt(tiny.tokenizer, Talk(1).heldout(i)) for i in range(16)]
    likeliest = sample(
        tiny.model, prompts, max_tokens=8, temperature=0.0, eos=eos_ids(tiny.model, tiny.tokenizer),
        generator=torch.Generator(),
    )  # fmt: skip
    wanted = [decode(tiny.tokenizer, answer.ids) for answer in likeliest]
    assert heard[1] == wanted
    assert heard[0] != wanted


def test_an_episode_ends_where_no_word_more_fits(tiny: LoadedModel):
    long, short = Talk(99), Talk(99)
    assert evaluated(tiny, long, 60) > evaluated(tiny, short, 16) > 1.0


def test_answers_that_can_not_be_scored_are_left_out_and_all_of_them_are_an_error(tiny: LoadedModel):
    assert evaluated(tiny, Talk(1, failing=range(8))) == 1.0
    with pytest.raises(TaskFailed, match="not one of 16 held-out answers"):
        evaluated(tiny, Talk(1, failing=range(16)))


def test_an_episode_whose_environment_fails_is_left_out_and_so_is_a_prompt_that_can_not_be_had(tiny: LoadedModel):
    class Shaky(Talk):
        def heldout(self, index: int) -> Prompt:
            if index == 3:
                raise TaskFailed("its process was killed")
            return super().heldout(index)

        def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
            if prompt.index < 8 and len(turns) == 2:
                raise TaskFailed("it took longer than 30 s")
            return super().respond(prompt, turns)

    task = Shaky(3)
    assert evaluated(tiny, task) > 2.5
    assert set(task.heard) >= set(range(8, 16))
    assert 3 not in task.heard
    # Who hadn't come to a second turn is scored all the same.
    assert all(len(task.heard[i]) < 3 for i in task.heard if i < 8)


class Curt(torch.nn.Module):
    """Ends each turn at once, with a single token."""

    def __init__(self, tiny: LoadedModel) -> None:
        super().__init__()
        self.config, self.generation_config = tiny.model.config, tiny.model.generation_config
        self.device, self.end = torch.device("cpu"), tiny.tokenizer.eos_token_id

    def forward(self, input_ids: torch.Tensor, past_key_values: object = None, **given: object) -> SimpleNamespace:
        logits = torch.zeros(len(input_ids), 1, self.config.vocab_size)
        logits[:, :, self.end] = 100.0
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("most", range(1, 13))
def test_a_reply_is_heard_only_if_one_token_more_fits_after_it(tiny: LoadedModel, most: int):
    task, spec = Talk(99), job(sampling={"max_tokens": most}, learner={"eval_prompts": 1})
    used = turns = 0
    while used < most:
        used, turns = used + 1, turns + 1
        reply = reply_of(task, task.heldout(0), tiny.tokenizer, [tiny.tokenizer.eos_token_id], [True])
        assert reply is not None
        used += len(reply)
    assert Evaluator(Curt(tiny), tiny.tokenizer, task, spec).run() == turns


class Wordy(Curt):
    """Turns of one and of four tokens in turn; on every second prompt all of four."""

    def __init__(self, tiny: LoadedModel, task: Talk) -> None:
        super().__init__(tiny)
        self.wordy = [encode_prompt(tiny.tokenizer, task.heldout(i)) for i in range(1, task.heldout_size, 2)]
        self.filler, self.turn, self.step = tiny.tokenizer("a")["input_ids"][0], 0, 0

    def forward(self, input_ids: torch.Tensor, past_key_values: object = None, **given: object) -> SimpleNamespace:
        if input_ids.shape[1] > 1:
            self.turn, self.step = self.turn + 1, 0
            long = [self.turn % 2 == 0 or self._second(row) for row in input_ids.tolist()]
            self.sizes = torch.tensor([4 if one else 1 for one in long])
        self.step += 1
        logits = torch.zeros(len(input_ids), 1, self.config.vocab_size)
        logits[:, :, self.filler] = 50.0
        logits[self.step >= self.sizes, :, self.end] = 100.0
        return SimpleNamespace(logits=logits)

    def _second(self, row: list[int]) -> bool:
        return any(row[i : i + len(ids)] == ids for ids in self.wordy for i in range(len(row)))


class Heard(Talk):
    """Notes how often it was asked for a reply."""

    def __init__(self) -> None:
        super().__init__(99)
        self.asked = [0] * 16

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        self.asked[prompt.index] += 1
        return super().respond(prompt, turns)


def room(most: int, reply: int, sizes: tuple[int, int]) -> tuple[list[int], int]:
    """Letters of each turn of an answer, and how many turns came to their end."""
    used, letters = 0, []
    for size in itertools.cycle(sizes):
        if size > most - used:
            return [*letters, most - used], len(letters)
        letters.append(size - 1)
        used += size
        if used + reply >= most:
            return letters, len(letters)
        used += reply
    raise AssertionError


@pytest.mark.parametrize("most", range(4, 22))
def test_each_answer_has_all_of_its_own_room_and_a_turn_that_is_cut_gets_no_reply(tiny: LoadedModel, most: int):
    task, spec = Heard(), job(sampling={"max_tokens": most}, learner={"eval_prompts": 16})
    reply = reply_of(Talk(99), task.heldout(0), tiny.tokenizer, [tiny.tokenizer.eos_token_id], [True])
    assert reply is not None
    Evaluator(Wordy(tiny, task), tiny.tokenizer, task, spec).run()
    for index, sizes in ((0, (1, 4)), (1, (4, 4))):
        letters, ended = room(most, len(reply), sizes)
        assert [len(turn) for turn in task.heard[index]] == letters
        assert task.asked[index] == ended


def test_answers_are_drawn_from_the_generator_that_is_given(tiny: LoadedModel):
    prompt = encode_prompt(tiny.tokenizer, Talk(1).heldout(0))
    sampled = Sampler(tiny.model, tiny.tokenizer, SamplingSpec())
    one, again, two = (sampled([prompt] * 8, 8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one == again != two


def test_no_more_prompts_are_asked_than_the_job_wants_and_the_task_has(tiny: LoadedModel):
    for wanted, asked in ((4, 4), (16, 16), (512, 16)):
        task, spec = Talk(1), job(sampling={"max_tokens": 2}, learner={"eval_prompts": wanted})
        evaluator = Evaluator(Curt(tiny), tiny.tokenizer, task, spec)
        assert (evaluator.prompts, evaluator.run()) == (asked, 1.0)
        assert set(task.heard) == set(range(asked))


class Leader(Alone):
    """Rank 0 of two: what it announced, and which tokens it drew."""

    def __init__(self) -> None:
        self.said: list[tuple[Op, bytes]] = []
        self.drawn: list[torch.Tensor] = []

    def announce(self, op: Op, payload: bytes = b"") -> None:
        self.said.append((op, payload))

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        self.drawn.append(tensor)
        return tensor


class Follower(Alone):
    """The other rank: it gets the tokens that rank 0 drew."""

    rank = 1

    def __init__(self, drawn: list[torch.Tensor]) -> None:
        self.drawn = list(drawn)

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.shape == self.drawn[0].shape
        return self.drawn.pop(0)


def test_other_ranks_need_the_announcements_alone_and_make_the_same_passes(tiny: LoadedModel):
    leader = Leader()
    spec = job(sampling={"max_tokens": 40}, learner={"eval_prompts": 16})
    Evaluator(tiny.model, tiny.tokenizer, Talk(3), spec, leader).run()
    assert [op for op, _ in leader.said] == ["sample"] * 3, "one for each turn"
    asked = [Sampling.model_validate_json(payload) for _, payload in leader.said]
    assert len(asked[0].prompts) == 16
    follower = Follower(leader.drawn)
    for a in asked:
        assert len(Sampler(tiny.model, tiny.tokenizer, SamplingSpec(), follower)(a.prompts, a.max_tokens)) == len(
            a.prompts
        )
    assert follower.drawn == []
