"""Hugging Face causal language models with a key/value-cache loop of our own.

Invariant: the log-prob that is recorded for a token is that of the distribution it was drawn from: softmax of the
logits over the temperature, nothing cut off. A request's draws come from its own seed, one uniform number per sample
and position; so a group is the same whatever shares its batch, as far as the logits are. (Padding and batch size
change the last bits of the logits; a draw that falls on such a bit may differ.)
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.initialization import no_init_weights

from app.protocol.errors import BadInput, IntegrityError, Unavailable
from app.rollout_agent.engines.adapter import adapt, read_config
from app.rollout_agent.engines.base import (
    Completion,
    GenRequest,
    Interrupted,
    Tainted,
    check_kind,
    check_layout,
    unique_tensors,
)
from app.rollout_agent.engines.blueprint import eos_ids
from app.rollout_agent.engines.check import check_loaded
from app.rollout_agent.engines.drawing import Batch, completions, draw, uniforms
from app.rollout_agent.proofs import Prover, following
from app.snapshots.codec import decode
from app.snapshots.manifest import Manifest

log = logging.getLogger(__name__)

COMPACT_BELOW = 0.5
"""When at most this share of the rows still samples, the finished rows leave the batch."""


class TransformersEngine:
    """Engine over `AutoModelForCausalLM`; float32 on a CPU, bfloat16 on a GPU."""

    def __init__(self, *, device: str = "cpu", threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._version: int | None = None
        self._quantisation: str | None = None
        self._tokenizer: Any = None
        self._model: Any = None
        self._adapted = False
        self._names: frozenset[str] = frozenset()
        self._weights: dict[str, torch.Tensor] = {}
        self._eos = torch.empty(0, dtype=torch.long)
        self._cache_word = "past_key_values"
        self._interrupted = threading.Event()
        self._proving = False

    @property
    def version(self) -> int | None:
        """Installed policy version."""
        return self._version

    @property
    def quantisation(self) -> str | None:
        """How the installed weights were quantised before they were sent."""
        return self._quantisation

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that `load` opened."""
        return self._tokenizer

    def load(self, model_dir: Path) -> None:
        """Build the model without weights, or under an adapter with its own. Code that comes with a model is never run.

        Raises BadInput.
        """
        try:
            adapter = read_config(model_dir)
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
            self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
            model = self._build(model_dir, config) if adapter is None else self._read(model_dir)
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(f"the model files do not make a causal language model: {error}"[:500]) from error
        self._model = model.to(self._device).eval().requires_grad_(False)
        state, self._adapted = self._model.state_dict(), adapter is not None
        if adapter is not None:
            state = adapt(self._model, adapter)
        self._names, self._weights = frozenset(state), unique_tensors(state)
        self._eos = torch.tensor(eos_ids(model.generation_config, config, self._tokenizer), device=self._device)
        if "cache" in inspect.signature(type(model).forward).parameters:
            self._cache_word = "cache"

    def _build(self, model_dir: Path, config: Any) -> Any:
        """The model, whose weights are to come with a snapshot."""
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=self._dtype, trust_remote_code=False)
        # Skipping the initialisation has skipped this too.
        model.tie_weights()
        return model

    def _read(self, model_dir: Path) -> Any:
        """The model with the weights that lie beside its configuration: snapshots bring an adapter only."""
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self._dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )

    def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """Read and check everything aside, copy it into the model, and check what is there then.

        Raises IntegrityError; then nothing changed. Raises Tainted if the last check fails.
        """
        check_kind(manifest, adapted=self._adapted)
        check_layout(manifest, {name: tuple(tensor.shape) for name, tensor in self._weights.items()})
        try:
            state = decode(payload, self._dtype)
        except (OSError, ValueError) as error:
            raise IntegrityError(f"the payload of snapshot v{version} can't be read: {error}"[:500]) from error
        wrong = [n for n, t in self._weights.items() if n not in state or state[n].shape != t.shape]
        wrong += sorted(state.keys() - self._names)
        if wrong:
            raise IntegrityError(f"the payload of snapshot v{version} is not what its manifest says: {wrong[:3]}")
        staged = {name: state[name].to(self._dtype) for name in self._weights}
        self._version = None
        try:
            with torch.inference_mode():
                for name, tensor in staged.items():
                    self._weights[name].copy_(tensor)
                check_loaded(payload, manifest, self._weights)
        except (RuntimeError, OSError) as error:
            raise Tainted(f"copying v{version} into the model failed: {error}"[:500]) from error
        self._version, self._quantisation = version, manifest.quantisation

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Sample all requests as one batch."""
        if self._version is None:
            raise Unavailable("no policy version is installed yet")
        self._check(requests)
        rows = sum(request.n for request in requests)
        with torch.inference_mode(), following(self._model, rows, wanted=self._proving) as prover:
            tokens, logprobs, limits = self._sample(requests, prover)
            proofs = None if prover is None else prover.proofs()
        return completions(tokens, logprobs, limits, self._eos.cpu().numpy(), proofs)

    def prove(self) -> None:
        """From now on each completion comes with proofs of the hidden states that it was drawn from."""
        self._proving = True

    def interrupt(self) -> None:
        """End a running `generate` at its next token; it returns what there is."""
        self._interrupted.set()

    def close(self) -> None:
        """Drop model and weights."""
        self._model = None
        self._weights = {}
        self._version = None

    def _check(self, requests: Sequence[GenRequest]) -> None:
        if not requests:
            raise BadInput("generate needs at least one request")
        vocabulary = self._model.config.get_text_config().vocab_size
        for request in requests:
            if not request.prompt_ids or request.n < 1 or min(request.first, request.start) < 0:
                raise BadInput("a request needs a prompt of at least one token, n of at least 1, first and start of 0")
            if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
                raise BadInput(f"a prompt has a token outside the model's vocabulary of {vocabulary}")

    def _sample(
        self, requests: Sequence[GenRequest], prover: Prover | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and log-probs [rows, steps taken], and each row's limit. Raises Interrupted before the first step."""
        cache = DynamicCache(config=self._model.config)
        logits, batch, source = self._prefill(requests, cache)
        rows, longest = len(batch.rows), int(batch.limits.max())
        limits = batch.limits.cpu().numpy()
        tokens = torch.zeros(rows, longest, dtype=torch.long, device=self._device)
        logprobs = torch.zeros(rows, longest, dtype=torch.float32, device=self._device)
        steps = 0
        for step in range(longest):
            if self._interrupted.is_set():
                break
            drawn, their_logprobs = draw(logits, batch.temperatures, batch.uniforms[:, step])
            tokens[batch.rows, step] = drawn
            logprobs[batch.rows, step] = their_logprobs
            if prover is not None:
                prover.drawn(batch.rows, ~batch.done, source if step == 0 else None)
            steps = step + 1
            batch.done |= torch.isin(drawn, self._eos) | (batch.limits <= step + 1)
            alive = len(batch.rows) - int(batch.done.sum())
            if alive == 0:
                break
            if alive <= COMPACT_BELOW * len(batch.rows):
                keep = (~batch.done).nonzero().squeeze(1)
                batch.select(keep)
                cache.batch_select_indices(keep)
                drawn = drawn[keep]
            logits = self._forward(drawn.unsqueeze(1), batch, cache)
        if not steps:
            raise Interrupted("generation was interrupted before its first token")
        return tokens[:, :steps].cpu().numpy(), logprobs[:, :steps].cpu().numpy(), limits

    def _prefill(self, requests: Sequence[GenRequest], cache: Any) -> tuple[torch.Tensor, Batch, torch.Tensor]:
        """Run every prompt once (left-padded) and spread logits and cache over the samples; whose each sample is."""
        width = max(len(r.prompt_ids) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        logits = self._call(ids, mask, positions, cache)
        counts = torch.tensor([r.n for r in requests])
        spread = torch.arange(len(requests)).repeat_interleave(counts).to(self._device)
        cache.batch_select_indices(spread)
        longest = max(r.sampling.max_tokens for r in requests)
        limits = torch.tensor([r.sampling.max_tokens for r in requests], device=self._device)
        temperatures = torch.tensor([r.sampling.temperature for r in requests], device=self._device)
        batch = Batch(
            rows=torch.arange(len(spread), device=self._device),
            limits=limits[spread],
            temperatures=temperatures[spread].unsqueeze(1),
            uniforms=torch.cat([uniforms(r, longest) for r in requests]).to(self._device),
            mask=mask[spread],
            positions=positions[spread, -1:],
            done=torch.zeros(len(spread), dtype=torch.bool, device=self._device),
        )
        return logits[spread], batch, spread

    def _forward(self, drawn: torch.Tensor, batch: Batch, cache: Any) -> torch.Tensor:
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.mask), 1)], dim=1)
        batch.positions = batch.positions + 1
        return self._call(drawn, batch.mask, batch.positions, cache)

    def _call(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [rows, vocabulary] of the last position."""
        answer = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_word: cache},
        )
        logits: torch.Tensor = answer.logits[:, -1]
        return logits
