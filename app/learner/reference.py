"""The policy that the KL divergence is taken from: v0, as it was loaded.

Invariant: its weights never change, and nothing of it is trained, saved or published.

It costs one more copy of the weights in memory (4 bytes a parameter in float32: 32 GB for 8B) and one forward pass
without gradient a step, about a third of the time of forward and backward.
"""

from __future__ import annotations

import copy
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from app.learner.microbatch import Row


def frozen_copy(model: Any) -> Any:
    """The model as it is now, for forward passes alone."""
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


def draws(rows: Sequence[Row], seed: int, step: int) -> torch.Tensor:
    """A number in [0, 1) for each completion token that the policy wrote, rows one after the other.

    Only job, step and row decide it, not the micro-batch, and no random state is touched. Two rows of a step with the
    same tokens and log-probs have the same numbers.
    """
    made: list[float] = []
    for row in rows:
        content = struct.pack(f"<{len(row.logprobs)}f", *row.logprobs) + repr(list(row.completion_ids)).encode()
        source = random.Random(f"{seed} {step} {zlib.crc32(content)}")
        made += row.own([source.random() for _ in row.completion_ids])
    return torch.tensor(made, dtype=torch.float32)
