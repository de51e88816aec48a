"""Prompt ⇄ token ids, the same on the learner and on every node.

Invariant: both sides call these functions with the same tokenizer files, so that the ids a node sampled from are the
ids that the learner trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.protocol.errors import BadInput
from app.tasks.base import Prompt

_MARK = "ECHO2ANSWER"
"""Stands for what the policy wrote where only what comes after it matters."""


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids that the model continues: the chat template's if the tokenizer has one, else those of the text.

    `tokenizer` is a transformers tokenizer. The result is never empty.
    """
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        # The template has written the special tokens already.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt.text)["input_ids"])


def encode_reply(tokenizer: Any, text: str, last_id: int) -> list[int]:
    """Token ids between two turns of the policy, when its last one ended with the token `last_id`.

    With a chat template: what it writes from the end of an answer over a user message with `text` to the beginning of
    the next answer, less an end-of-turn token that the policy has written itself. Without one: the text as it is. What
    a template does to earlier turns (some drop their thinking) is left out: what was said stays as it was said. Raises
    BadInput for a reply of no tokens, which would make one turn of two.
    """
    if tokenizer.chat_template:
        turns = [("user", ""), ("assistant", _MARK), ("user", text)]
        messages = [{"role": role, "content": content} for role, content in turns]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        between = whole.partition(_MARK)[2]
    else:
        between = text
    ids = list(tokenizer(between, add_special_tokens=False)["input_ids"])
    if ids and ids[0] == last_id and ids[0] in tokenizer.all_special_ids:
        ids = ids[1:]
    if not ids:
        raise BadInput("a reply of the task's environment has no tokens")
    return ids


def decode(tokenizer: Any, completion_ids: Sequence[int]) -> str:
    """The answer's text, without special tokens, exactly as written."""
    text: str = tokenizer.decode(list(completion_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
