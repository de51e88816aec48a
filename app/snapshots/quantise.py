"""Weights in eight bits: int8 with one float32 scale per output channel. Pure.

Invariant: the same weights give the same bytes; what `restored` makes of them is a function of those bytes and the type
asked for, and within half a step (scale / 2) of the weights. A matrix and its scales belong together by name alone: `w`
and `w.scale`.

Quantised are matrices in which one row makes one output. Embeddings and the output layer are not: each of their rows is
one token's, so that an error there moves that token's probability directly, and in small models they are often one
tensor. A router is not, for its error changes which experts are asked. One-dimensional tensors (norms, biases) are a
thousandth of the size. Whatever this rule says, the manifest lists what was done, and receivers go by that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from app.protocol.errors import BadInput, IntegrityError
from app.snapshots.manifest import SCALE

LEVELS = 127
"""−127 … 127: symmetric, −128 isn't used."""
LEAST_ELEMENTS = 4096
"""Below that a matrix stays as it is: what it would save is less than a packet or two."""
_KEPT = re.compile(r"embed|lm_head|(^|\.)(wte|wpe)\.|(^|\.)(gate|router)\.weight$")


def chosen(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a model is sent in eight bits. An even number of elements keeps all that follows aligned."""
    return tensor.dim() == 2 and tensor.numel() >= LEAST_ELEMENTS and tensor.numel() % 2 == 0 and not _KEPT.search(name)


def scale_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each row / 127, float32 [rows] on the CPU; 0 for a row of zeros.

    Raises BadInput for a weight that is not finite: there is no scale for it.
    """
    scale = weight.detach().to(device="cpu", dtype=torch.float32).abs().amax(dim=1) / LEVELS
    if not torch.isfinite(scale).all():
        raise BadInput(f"{name} has values that are not finite: it can't be sent in eight bits")
    return scale


def levels_of(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight in steps of its rows' scale, int8 [rows, columns] on the CPU, halves rounded to even."""
    exact = weight.detach().to(device="cpu", dtype=torch.float32)
    # Where a 127th of the largest value underflows to 0, the row is as good as zero.
    steps = exact / torch.where(scale > 0, scale, 1.0)[:, None]
    return steps.round_().clamp_(-LEVELS, LEVELS).to(torch.int8).contiguous()


def restored(levels: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that nodes sample with: level · scale in float32, then cast to `dtype`."""
    return (levels.to(torch.float32) * scale[:, None]).to(dtype)


def restored_state(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A payload's tensors with the quantised ones restored and their scales gone: the names are the model's.

    Raises IntegrityError for a matrix without scales that fit.
    """
    levels = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    scales = {name + SCALE for name in levels}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name in levels:
            scale = stored.get(name + SCALE)
            if scale is None or tensor.dim() != 2 or scale.dtype != torch.float32 or scale.shape != tensor.shape[:1]:
                raise IntegrityError(f"{name} has eight bits, and no scales that fit")
            state[name] = restored(tensor, scale, dtype)
        elif name not in scales:
            state[name] = tensor
    return state
