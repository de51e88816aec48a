"""Answers are drawn from the distribution whose log-probs they come with, whatever they are batched with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from app.learner.sampling import Completion, eos_ids, sample
from tests.unit.learner.samples import VOCABULARY, random_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [3]]


def sharper():
    """Goes on from one token to quite others."""
    model = random_model()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(14)
    return model


MODEL = sharper()


def drawn(prompts, temperature: float = 1.0, *, model=MODEL, most: int = 6, eos=(), seed: int = 1, **more):
    generator = torch.Generator().manual_seed(seed)
    return sample(
        model, prompts, max_tokens=most, temperature=temperature, eos=frozenset(eos), generator=generator, **more
    )


def table(prompt: list[int], made: Completion) -> torch.Tensor:
    """Logits of each token of an answer, the answer alone in its row."""
    with torch.no_grad():
        return MODEL(input_ids=torch.tensor([[*prompt, *made.ids]])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(temperature: float):
    for prompt, made in zip(PROMPTS, drawn(PROMPTS, temperature), strict=True):
        logits = table(prompt, made)
        own = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, torch.tensor(made.ids)[:, None])[:, 0]
        assert made.logprobs == pytest.approx(own.tolist(), abs=1e-4)
        if temperature == 0.0:
            assert made.ids == logits.argmax(-1).tolist(), "the likeliest token at each place"


def test_tokens_come_as_often_as_their_probability_says():
    found = drawn([[3, 1, 4]] * 4000, 2.0, most=1)
    with torch.no_grad():
        wanted = torch.softmax(MODEL(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1] / 2.0, -1)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in found]), minlength=VOCABULARY) / 4000
    assert (counts - wanted).abs().max() < 0.03


def test_an_answer_is_the_same_alone_and_beside_longer_ones():
    together = drawn(PROMPTS, 0.0)
    assert [drawn([prompt], 0.0)[0].ids for prompt in PROMPTS] == [c.ids for c in together]
    assert [c.ids for c in drawn(PROMPTS, 0.0, max_batch=1)] == [c.ids for c in together]


def test_an_answer_ends_with_the_first_token_that_ends_one_or_at_the_limit():
    free = drawn(PROMPTS, 0.0)
    assert {(len(c.ids), len(c.logprobs), c.finish_reason) for c in free} == {(6, 6, "length")}
    end = free[0].ids[2]
    for before, after in zip(free, drawn(PROMPTS, 0.0, eos=(end, VOCABULARY + 1)), strict=True):
        size = before.ids.index(end) + 1 if end in before.ids else 6
        assert after.ids == before.ids[:size]
        assert len(after.logprobs) == size
        assert after.finish_reason == ("stop" if end in before.ids else "length")


def test_the_same_generator_draws_the_same_and_the_global_state_is_left_alone():
    before = torch.random.get_rng_state()
    one, two, other = drawn(PROMPTS), drawn(PROMPTS), drawn(PROMPTS, seed=2)
    assert one == two != other
    assert torch.equal(before, torch.random.get_rng_state())


def test_who_agrees_has_the_last_word_on_each_token():
    made = drawn(PROMPTS, agree=lambda tokens: torch.full_like(tokens, 7), most=2)
    assert [c.ids for c in made] == [[7, 7]] * 4
    first = torch.log_softmax(table(PROMPTS[1], made[1]), -1)[:, 7]
    assert made[1].logprobs == pytest.approx(first.tolist(), abs=1e-4)


class Watched(torch.nn.Module):
    """Says end after one token; notes the rows and width of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.device, self.seen = random_model(), torch.device("cpu"), []
        self.config, self.places = self.inner.config, []

    def forward(self, input_ids, past_key_values=None, **given):
        self.seen.append(tuple(input_ids.shape))
        self.places.append(given["position_ids"].tolist())
        logits = torch.zeros(len(input_ids), 1, VOCABULARY)
        logits[:, :, 7] = 100.0
        return SimpleNamespace(logits=logits)


def test_a_batch_has_no_more_rows_and_padded_tokens_than_fit_and_is_over_when_all_have_ended():
    model = Watched()
    prompts = [[1] * n for n in (9, 2, 5, 2, 9, 2, 5)]
    # 65,536 tokens hold three rows of at most 21,845.
    assert [c.ids for c in drawn(prompts, 0.0, model=model, most=21_840, eos=(7,))] == [[7]] * 7
    assert model.seen == [(3, 2), (2, 5), (2, 9)]
    model.seen.clear()
    drawn(prompts, 0.0, model=model, eos=(7,), max_batch=4)
    assert model.seen == [(4, 5), (3, 9)]


def test_the_places_of_tokens_are_counted_from_the_beginning_of_their_own_prompt():
    model = Watched()
    drawn([[1], [1, 2, 3]], 0.0, model=model, most=3)
    assert model.places == [[[0, 0, 0], [0, 1, 2]], [[1], [3]], [[2], [4]]]


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [(None, 3, {3}), (5, 3, {3, 5}), ([5, 6], 3, {3, 5, 6}), ([5], None, {5}), (None, None, set())],
)
def test_an_answer_ends_where_tokenizer_or_generation_config_say(config, tokenizer, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=config))
    assert eos_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == expected
