"""Whether a model keeps the answers apart that stand in one row.

Invariant: a model that passes gives each answer of a row the log-probs that it has alone.
"""

from __future__ import annotations

from typing import Any

import torch

from app.learner.microbatch import Row, collate, completion_logprobs
from app.protocol.errors import BadInput
from app.protocol.learner_spec import LearnerSpec

_SIZE = 8


def check_job(model: Any, spec: LearnerSpec) -> None:
    """`check_packing` as far as a job needs it; if it does, a forward pass of every rank. Raises BadInput."""
    if spec.packing:
        check_packing(model, close=1e-3 if spec.precision == "float32" else 0.25)


@torch.no_grad()
def check_packing(model: Any, *, close: float) -> None:
    """Try it on two made-up answers; a forward pass of every rank. Raises BadInput if log-probs differ by more than
    `close`: the model's layers look across the border (linear attention does), or take no positions."""
    vocabulary = model.config.get_text_config().vocab_size
    numbers = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(2 * _SIZE)]
    rows = [Row(part[:2], part[2:], [0.0] * (_SIZE - 2), 0.0, [0] * (_SIZE - 2)) for part in _halves(numbers)]
    alone, together = (
        completion_logprobs(model, collate(rows, model.device, packed=packed), 1.0) for packed in (False, True)
    )
    apart = float((alone - together).abs().max())
    if not apart <= close:
        raise BadInput(f"learner.packing: answers in a row change each other's log-probs by {apart:.2g}; leave it out")


def _halves(numbers: list[int]) -> tuple[list[int], list[int]]:
    return numbers[:_SIZE], numbers[_SIZE:]
