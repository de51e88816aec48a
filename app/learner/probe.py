"""What a published version says of a few tokens, so that an engine that has loaded it can show that it has.

Invariant: the log-probs are those of the published weights, rounded or quantised as nodes get them, read back from the
very payload that is signed; the trained model is not touched and no step waits. A version whose log-probs are not
finite is never published.

It costs a copy of the model in float32 in host memory, and a pass of some 32 tokens through it on the CPU for each
version, in the publisher's thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from app.learner.lora import add_adapter
from app.learner.model import LoadedModel, load, trained_weights
from app.learner.sampling import sample
from app.protocol.errors import LearnerError
from app.protocol.job import JobSpec
from app.snapshots.codec import decode
from app.snapshots.manifest import Probe

TOKENS = 32
_PROMPT = 20
"""Tokens of the prompt at most: what the model itself goes on with is worth more."""
MOST_PARAMETERS = 2_000_000_000
"""Up to this size of a model there is a probe unless the job says otherwise."""


def wants_probe(wanted: bool | None, parameters: int) -> bool:
    """Whether versions carry a probe; `wanted` as in the job, None: up to MOST_PARAMETERS."""
    return parameters <= MOST_PARAMETERS if wanted is None else wanted


class Prober:
    """Made by the process's main thread: loading a model changes global state. Called from the publisher's."""

    def __init__(self, model: Any, token_ids: Sequence[int]) -> None:
        self._model = model
        self._ids = list(token_ids)
        self._weights = trained_weights(model)

    def __call__(self, payload: Path) -> Probe:
        """Log-probs under the weights in a payload. Raises LearnerError if they are not finite or not the model's."""
        state = decode(payload)
        missing = sorted(self._weights.keys() - state.keys())
        if missing:
            raise LearnerError(f"the payload that is to be published lacks {missing[0]}")
        ids = torch.tensor([self._ids])
        with torch.no_grad():
            for name, tensor in self._weights.items():
                tensor.copy_(state[name])
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        if not all(map(math.isfinite, found)):
            raise LearnerError("the weights give log-probs that are not finite, and are not published")
        return Probe(token_ids=self._ids, logprobs=[min(0.0, p) for p in found])


def open_prober(loaded: LoadedModel, spec: JobSpec, prompt: Sequence[int]) -> Prober | None:
    """A prober for a job, on `prompt` and what v0 most likely goes on with; None if the job has none."""
    if not wants_probe(spec.learner.probe, loaded.parameters):
        return None
    model = load(loaded.folder, device=torch.device("cpu")).model
    ids = tokens_of(model, prompt)
    if spec.learner.lora is not None:
        add_adapter(model, spec.learner.lora, name=spec.model, seed=spec.seed)
    return Prober(model.requires_grad_(False), ids)


def tokens_of(model: Any, prompt: Sequence[int]) -> list[int]:
    """TOKENS token ids: the beginning of a prompt, and the most likely ones from there."""
    begin = list(prompt[:_PROMPT])
    (answer,) = sample(
        model, [begin], max_tokens=TOKENS - len(begin), temperature=0.0, eos=frozenset(), generator=torch.Generator()
    )
    return [*begin, *answer.ids]
