"""A model under an adapter: the weights that stay, and the small matrices that a version replaces in place.

Invariant: a layer gives W·x + scale·B·(A·x), which with B = 0 is what it gave before; only A and B ever change. What
must be known of the adapter is in one file beside the model's; its name is not PEFT's, because the library would take
that for an order to load an adapter of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from app.protocol.errors import BadInput
from app.snapshots.manifest import ADAPTER_ASSET

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank, scale, and the last part of the names of the layers that have one."""

    rank: int
    scale: float
    targets: frozenset[str]


class Adapted(nn.Module):
    """A linear layer with its adapter. `lora_A` [rank, inputs], `lora_B` [outputs, rank], no gradient."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        weight = base.weight
        self.base = base
        self.scale = scale
        self.lora_A = nn.Parameter(weight.new_zeros(rank, base.in_features), requires_grad=False)
        self.lora_B = nn.Parameter(weight.new_zeros(base.out_features, rank), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] → [..., outputs]."""
        added = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        result: torch.Tensor = self.base(x) + added * self.scale
        return result


def read_config(folder: Path) -> AdapterConfig | None:
    """What the learner says of its adapter; None if it trains the model itself. Raises BadInput if it can't be read."""
    path = folder / ADAPTER_ASSET
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        rank, targets = int(found["r"]), frozenset(found["target_modules"])
        scale = float(found["lora_alpha"]) / rank
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise BadInput(f"{ADAPTER_ASSET} does not describe an adapter: {error}"[:500]) from error
    return AdapterConfig(rank, scale, targets)


def adapt(model: Any, config: AdapterConfig) -> dict[str, torch.Tensor]:
    """Put an adapter that does nothing yet into a model, in place; its tensors by PEFT's names.

    Raises BadInput if the model has no such layers.
    """
    weights: dict[str, torch.Tensor] = {}
    layers = [(name, layer) for name, layer in model.named_modules() if name.rpartition(".")[2] in config.targets]
    for name, layer in layers:
        if not isinstance(layer, nn.Linear):
            raise BadInput(f"{name} is a {type(layer).__name__}: only linear layers can have an adapter")
        parent, _, leaf = name.rpartition(".")
        adapted = Adapted(layer, config.rank, config.scale)
        setattr(model.get_submodule(parent), leaf, adapted)
        weights[f"{_PREFIX}{name}.lora_A.weight"] = adapted.lora_A
        weights[f"{_PREFIX}{name}.lora_B.weight"] = adapted.lora_B
    if not weights:
        raise BadInput(f"the model has no layers named {', '.join(sorted(config.targets))}")
    return weights
