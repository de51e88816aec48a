"""Turns and tokens: what stands between two turns of the policy, and how they are told apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from app.protocol.errors import BadInput, TaskFailed
from app.protocol.task_spec import TaskSpec
from app.tasks.base import Prompt
from app.tasks.prompts import decode, encode_prompt, encode_reply
from app.tasks.registry import load_task
from app.tasks.scoring import reply_of, reward_of, reward_of_turns, turns_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{{ m['content'].split('</think>')[-1] | trim }}<|im_end|>\n"
    "{% else %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None) -> Any:
    """Bytes, and the tags of ChatML as tokens of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[0-9]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_a_conversation_reads_as_the_template_would_write_it(template: str):
    own = tokenizer(template)
    prompt = encode_prompt(own, Prompt(0, "Play.", {}))
    first = [*own("check", add_special_tokens=False)["input_ids"], own.eos_token_id]
    ids = [*prompt, *first, *encode_reply(own, "It bets.", first[-1])]
    messages = [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "check"}]
    messages.append({"role": "user", "content": "It bets."})
    whole = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # The generation prompt of the first turn is what the policy saw; a template writes it for the last one only.
    opening = own.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    plain = own.apply_chat_template(messages[:2], tokenize=False).removesuffix("check<|im_end|>\n")
    assert own.decode(ids) == whole.replace(plain, opening, 1)


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_beginning_mark_stands_once_before_the_prompt_and_never_before_a_reply(template: str | None):
    """Where the tokenizer puts one before each text; a template writes its own."""
    plain, own = tokenizer(template), tokenizer(template)
    start = own.convert_tokens_to_ids("<|im_start|>")
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert own("x")["input_ids"][0] == start
    prompt = Prompt(0, "Play.", {})
    assert encode_prompt(own, prompt) == [*([] if template else [start]), *encode_prompt(plain, prompt)]
    assert encode_reply(own, "It bets.", 5) == encode_reply(plain, "It bets.", 5)


def test_an_answer_is_read_as_it_was_written_without_the_marks_around_it():
    own = tokenizer(CHATML)
    ids = [*own(" I 'm done , n't I ?")["input_ids"], own.eos_token_id]
    assert decode(own, ids) == " I 'm done , n't I ?"


def test_an_end_that_the_policy_wrote_is_not_written_again_and_another_is():
    own = tokenizer(CHATML)
    with_end = encode_reply(own, "no", own.eos_token_id)
    without = encode_reply(own, "no", 5)
    assert without == [own.eos_token_id, *with_end]
    assert own.decode(with_end) == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_without_a_template_the_reply_is_the_text():
    own = tokenizer(None)
    assert own.decode(encode_reply(own, " then 7", own.eos_token_id)) == " then 7"
    # A letter is no end of a turn, even where the policy happened to stop on it.
    assert own.decode(encode_reply(own, "xy", own("x")["input_ids"][0])) == "xy"
    with pytest.raises(BadInput, match="no tokens"):
        encode_reply(own, "", own.eos_token_id)


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.text("xyz", min_size=1, max_size=4)), min_size=1))
def test_turns_are_found_again_by_their_marks(said: list[tuple[str, str]]):
    class Letters:
        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    ids = [ord(letter) for own, other in said for letter in own + other]
    marks = [mark for own, other in said for mark in [True] * len(own) + [False] * len(other)]
    assert turns_of(Letters(), ids, marks) == [own for own, _ in said]
    assert turns_of(Letters(), ids, None) == ["".join(own + other for own, other in said)]


def test_a_task_with_one_turn_takes_one():
    task = load_task(TaskSpec(name="reasoning_gym", params={"dataset": "gcd", "size": 20}), 0)
    prompt = task.train(0)
    assert reward_of_turns(task, prompt, [prompt.entry["answer"]]) == 1.0
    with pytest.raises(BadInput, match="has one turn, but there are 2"):
        reward_of_turns(task, prompt, ["1", "2"])


def test_a_reward_that_is_not_finite_is_an_error():
    class Odd:
        name, train_size, heldout_size = "odd", 1, 1

        def train(self, index: int) -> Prompt:
            return Prompt(index, "q", {})

        heldout = train

        def reward(self, prompt: Prompt, completion_text: str) -> float:
            return float(completion_text)

    own = tokenizer(None)
    for text, says in (("nan", "not finite"), ("-inf", "not finite")):
        with pytest.raises(TaskFailed, match=says):
            reward_of(Odd(), Prompt(0, "q", {}), own, own(text)["input_ids"], None)
    assert reward_of(Odd(), Prompt(0, "q", {}), own, own("0.5")["input_ids"], None) == 0.5


def test_a_hand_of_poker_is_scored_from_its_tokens():
    task, own = load_task(TaskSpec(name="poker"), 0), tokenizer(CHATML)
    prompt = next(p for p in map(task.train, range(999)) if task.respond(p, ["c"]) is not None)
    first = [*own("c")["input_ids"], own.eos_token_id]
    reply = encode_reply(own, task.respond(prompt, ["c"]).text, first[-1])
    last = [*own("fold")["input_ids"], own.eos_token_id]
    marks = [True] * len(first) + [False] * len(reply) + [True] * len(last)
    expected = task.episode_reward(prompt, ["c", "fold"])
    assert reward_of(task, prompt, own, [*first, *reply, *last], marks) == expected


def test_the_environment_replies_to_what_the_policy_wrote_until_the_episode_is_over():
    task, own = load_task(TaskSpec(name="poker"), 0), tokenizer(CHATML)
    prompt = next(p for p in map(task.train, range(999)) if task.respond(p, ["c"]) is not None)
    ended = [*own("c")["input_ids"], own.eos_token_id]
    text = task.respond(prompt, ["c"]).text
    reply = reply_of(task, prompt, own, ended, [True] * len(ended))
    assert reply == encode_reply(own, text, own.eos_token_id), "the end that the policy wrote is not written again"
    cut = own("c")["input_ids"]
    assert reply_of(task, prompt, own, cut, None) == [own.eos_token_id, *reply]
    ids = [*ended, *reply, *own("fold")["input_ids"], own.eos_token_id]
    marks = [True] * len(ended) + [False] * len(reply) + [True] * (len(ids) - len(ended) - len(reply))
    assert reply_of(task, prompt, own, ids, marks) is None


def test_a_task_with_one_turn_has_no_reply():
    task, own = load_task(TaskSpec(name="reasoning_gym", params={"dataset": "gcd", "size": 20}), 0), tokenizer(CHATML)
    assert reply_of(task, task.train(0), own, own("7")["input_ids"], None) is None


def test_scoring_an_answer_does_not_count_the_prompts():
    """That may mean to draw all of them."""
    task: Any = load_task(TaskSpec(name="reasoning_gym", params={"dataset": "gcd", "size": 1_000_000}), 0)
    prompt = task.train(0)
    assert reward_of_turns(task, prompt, [prompt.entry["answer"]]) == 1.0
    assert task._scanned < 100
