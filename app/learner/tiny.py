"""The models `tiny` and `small`: real GRPO runs of them fit two CPU cores.

Invariant: the folder `tiny-<recipe hash>` is complete or absent, is made once however many processes ask, and depends
on nothing but the recipe (weights are equal bit by bit on the same kind of CPU).

A Qwen3 (of 460 thousand parameters, and of 3.5 million) learns to spell short words backward by supervised warm-up
until it gets about one answer in five right. Warm-up never sees a held-out question.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.learner.files import exclusive, fsync_tree
from app.learner.sampling import sample
from app.protocol.errors import LearnerError
from app.protocol.task_spec import TaskSpec
from app.tasks.prompts import decode, encode_prompt
from app.tasks.registry import load_task

log = logging.getLogger(__name__)
TINY, SMALL = "tiny", "small"
_TASK: dict[str, Any] = {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5}
_TEMPLATE = "Spell this word backward (example: sun -> nus): "
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the weights depend on. Another recipe is another folder."""

    format: int = 1
    seed: int = 1
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    intermediate: int = 384
    max_positions: int = 256
    learning_rate: float = 4e-3
    batch: int = 32
    lr_warmup_steps: int = 20
    check_every: int = 10
    stop_at: float = 0.12
    """Validation accuracy at which the learning rate starts to decay to 0."""
    decay_steps: int = 20
    max_steps: int = 600

    @property
    def digest(self) -> str:
        """Names the folder."""
        text = json.dumps([dataclasses.asdict(self), _TASK, _TEMPLATE, _CHAT_TEMPLATE], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


RECIPES = {TINY: Recipe(), SMALL: Recipe(hidden=256, layers=4, heads=8, intermediate=768, learning_rate=2e-3)}
"""A training step of `small` on two cores takes a second: longer than a version needs to reach the nodes."""


def tiny_model(cache_dir: Path, recipe: Recipe = Recipe()) -> Path:
    """The Hugging Face folder of the tiny model; makes it (some 15 seconds of one core) if it is not there.

    Raises LearnerError if another process holds the lock for ten minutes or the recipe doesn't learn.
    """
    folder = cache_dir / f"{TINY}-{recipe.digest}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(cache_dir / f".{TINY}.lock", timeout_s=_LOCK_TIMEOUT_S):
        if folder.is_dir():
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{TINY}-", dir=cache_dir))
        try:
            _make(recipe, scratch)
            fsync_tree(scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _make(recipe: Recipe, folder: Path) -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(recipe.seed)
        tokenizer = build_tokenizer()
        model = _build_model(recipe, tokenizer)
        began = time.monotonic()
        steps, accuracy = _warm_up(model, tokenizer, recipe)
        seconds = time.monotonic() - began
        log.info("a model of %d layers: %d steps, %.1f s, validation %.3f", recipe.layers, steps, seconds, accuracy)
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer() -> Any:
    """One token a byte, and the constant part of the question as one token: 260 in all, prompts of 5 to 7 tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    core.add_tokens([_TEMPLATE])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _build_model(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).eval()


def _words(task: Any) -> tuple[list[Any], list[Any]]:
    """Training prompts for the warm-up, and 128 that it is measured on."""
    prompts = [task.train(i) for i in range(task.train_size)]
    kept = [p for p in prompts if zlib.crc32(p.text.lower().encode()) % 8 != 1]
    checked = [p for p in prompts if zlib.crc32(p.text.lower().encode()) % 8 == 1]
    return kept, checked[:128]


def _warm_up(model: Any, tokenizer: Any, recipe: Recipe) -> tuple[int, float]:
    """Supervised steps until the stop rule; returns their number and the last validation accuracy."""
    task = load_task(TaskSpec(name="reasoning_gym", params=_TASK), 0)
    train, check = _words(task)
    rows = [
        (encode_prompt(tokenizer, p), [*tokenizer(p.text.rsplit(" ", 1)[1][::-1])["input_ids"], tokenizer.eos_token_id])
        for p in train
    ]
    batches = _batches(rows, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    decay_from: int | None = None
    accuracy = 0.0
    for step in range(recipe.max_steps):
        if decay_from is not None and step - decay_from >= recipe.decay_steps:
            return step, accuracy
        scale = min(1.0, (step + 1) / recipe.lr_warmup_steps)
        if decay_from is not None:
            scale *= 1 - (step - decay_from) / recipe.decay_steps
        _supervised_step(model, optimizer, next(batches), recipe.learning_rate * scale)
        if decay_from is None and (step + 1) % recipe.check_every == 0:
            accuracy = _accuracy(model, tokenizer, task, check, generator)
            decay_from = step + 1 if accuracy >= recipe.stop_at else None
    raise LearnerError(f"the starting model did not reach {recipe.stop_at:.0%} in {recipe.max_steps} warm-up steps")


def _batches(
    rows: Sequence[tuple[list[int], list[int]]], recipe: Recipe
) -> Iterator[list[tuple[list[int], list[int]]]]:
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order) - recipe.batch + 1, recipe.batch):
            yield [rows[i] for i in order[start : start + recipe.batch]]


def _supervised_step(model: Any, optimizer: Any, batch: Sequence[tuple[list[int], list[int]]], lr: float) -> None:
    width = max(len(p) + len(a) for p, a in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    for row, (prompt, answer) in enumerate(batch):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()


def _accuracy(model: Any, tokenizer: Any, task: Any, prompts: Sequence[Any], generator: torch.Generator) -> float:
    twice = [p for p in prompts for _ in range(2)]
    made = sample(
        model,
        [encode_prompt(tokenizer, p) for p in twice],
        max_tokens=6,
        temperature=1.0,
        eos=frozenset({tokenizer.eos_token_id}),
        generator=generator,
    )
    hits = sum(task.reward(p, decode(tokenizer, c.ids)) for p, c in zip(twice, made, strict=True))
    return float(hits) / len(twice)
