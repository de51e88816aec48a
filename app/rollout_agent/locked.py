"""A tokenizer for several threads.

Invariant: no two threads are in the tokenizer at a time; Hugging Face's fast ones fail when they are.
"""

from __future__ import annotations

import threading
from typing import Any


class LockedTokenizer:
    """The calls that `app.tasks.prompts` makes, each under one lock."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self._tokenizer.chat_template

    @property
    def all_special_ids(self) -> list[int]:
        """The tokenizer's."""
        return list(self._tokenizer.all_special_ids)

    def __call__(self, text: str, **options: Any) -> Any:
        """Token ids of a text."""
        with self._lock:
            return self._tokenizer(text, **options)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """Messages as the model expects them."""
        with self._lock:
            return self._tokenizer.apply_chat_template(messages, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        """Text of token ids."""
        with self._lock:
            text: str = self._tokenizer.decode(ids, **options)
        return text
