"""Sampling from a causal language model with a key-value cache.

Invariant: only the generator that is handed in is drawn from; the global random state is untouched. Log-probs are those
of the distribution sampled from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_BATCH = 256
MAX_BATCH_TOKENS = 65_536
"""Padded tokens (prompt + completion) whose keys and values are held at once."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids (with the end-of-sequence token when `finish_reason` is `stop`) and one log-prob a token."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, from the tokenizer and the model's generation config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    eos: frozenset[int],
    generator: torch.Generator,
    max_batch: int = MAX_BATCH,
    agree: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens,
) -> list[Completion]:
    """One completion for each prompt, in order. `temperature` 0 means the most likely token.

    Prompts are sorted by length into batches of at most `max_batch` rows and MAX_BATCH_TOKENS padded tokens. `agree`
    has the last word on each batch's next tokens [rows]: ranks that sample together must not drift apart.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[Completion | None] = [None] * len(prompts)
    start = 0
    while start < len(order):
        batch = [order[start]]
        for i in order[start + 1 : start + max_batch]:
            if (len(batch) + 1) * (len(prompts[i]) + max_tokens) > MAX_BATCH_TOKENS:
                break
            batch.append(i)
        made = _sample_batch(model, [prompts[i] for i in batch], max_tokens, temperature, eos, generator, agree)
        for i, completion in zip(batch, made, strict=True):
            results[i] = completion
        start += len(batch)
    return [r for r in results if r is not None]


@torch.no_grad()
def _sample_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    eos: frozenset[int],
    generator: torch.Generator,
    agree: Callable[[torch.Tensor], torch.Tensor],
) -> list[Completion]:
    from transformers import DynamicCache

    device, rows, width = model.device, len(prompts), max(len(p) for p in prompts)
    ids = torch.zeros((rows, width), dtype=torch.long)
    mask = torch.zeros((rows, width + max_tokens), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
    stops = torch.tensor(sorted(eos) or [-1], device=device)
    cache = {_cache_name(model): DynamicCache(config=model.config)}
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for step in range(max_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask[:, : width + step],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        ).logits[:, -1]
        token, logprob = _draw(logits.float(), temperature, generator, agree)
        tokens.append(token)
        logprobs.append(logprob)
        done |= torch.isin(token, stops)
        if bool(done.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
    return _cut(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), eos)


def _cache_name(model: Any) -> str:
    """The argument that takes the cache; transformers renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _draw(
    logits: torch.Tensor,
    temperature: float,
    generator: torch.Generator,
    agree: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        token = torch.multinomial(scaled.exp(), 1, generator=generator)
    else:
        token = scaled.argmax(-1, keepdim=True)
    token = agree(token)
    return token[:, 0], scaled.gather(1, token)[:, 0]


def _cut(tokens: list[list[int]], logprobs: list[list[float]], eos: frozenset[int]) -> list[Completion]:
    made = []
    for row, probs in zip(tokens, logprobs, strict=True):
        end = next((i for i, token in enumerate(row) if token in eos), None)
        size = len(row) if end is None else end + 1
        made.append(Completion(row[:size], probs[:size], "length" if end is None else "stop"))
    return made
