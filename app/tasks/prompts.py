"""Prompt ⇄ token ids, the same on the learner and on every node.

Invariant: both sides call these functions with the same tokenizer files, so that the ids a node sampled from are the
ids that the learner trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.tasks.base import Prompt


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


def decode(tokenizer: Any, completion_ids: Sequence[int]) -> str:
    """The answer's text, without special tokens, exactly as written."""
    text: str = tokenizer.decode(list(completion_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
