"""Weights that are spread over the ranks (FSDP2), and how they come together for a copy.

Invariant: what is read or changed between passes is a rank's share of parameters, gradients and optimizer state, in
float32, and all that it holds but for what a forward pass alone has left, until then; a whole tensor is put together
one at a time, and only rank 0 keeps it, in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from app.learner.parallel import launch
from app.learner.parallel.ranks import Ranks
from app.protocol.errors import BadInput
from app.protocol.learner_spec import LearnerSpec


def needs_shards(spec: LearnerSpec, ranks: Ranks) -> bool:
    """Whether the model has to be wrapped: several ranks, or passes in another precision than the weights'."""
    return ranks.size > 1 or spec.precision != "float32"


def blocks(model: Any) -> list[nn.Module]:
    """The layers of the decoder, outermost first. Raises BadInput if they can't be found."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise BadInput(f"no list of {count} layers was found in {type(model).__name__}: it can't be cut into shards")


def shard(model: Any, spec: LearnerSpec, ranks: Ranks) -> None:
    """Spread a model, in place, that every rank has loaded alike; layer by layer, so that no GPU ever holds it whole.

    The passes are in `spec.precision`; weights, gradients and their sums stay in float32.
    """
    launch.alone()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (ranks.size,))
    dtype = torch.bfloat16 if spec.precision == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks(model):
        # On one rank there is nothing to be saved between forward and backward.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=ranks.size > 1)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reshard(model: Any) -> None:
    """Before weights change: let go of what a forward pass put together and no backward pass has let go of.

    The next pass would go on with that.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """A copy of a tensor in host memory, put together of all shards; None on ranks that don't keep it. Collective."""
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.to("cpu", copy=True) if keep else None


@torch.no_grad()
def spread(source: torch.Tensor | None, like: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Rank 0's `source` with the device and the shards of `like`; `source` is not looked at on other ranks."""
    if not isinstance(like, DTensor):
        held = torch.empty_like(like) if source is None else source.to(like.device, like.dtype, copy=True)
        return ranks.first(held)
    if source is None:
        full = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        full = source.to(like.device, like.dtype, copy=True)
    return distribute_tensor(ranks.first(full), like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def number(tensor: torch.Tensor) -> float:
    """The value of a tensor of one element, over all shards. Collective."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def prepare_passes(model: Any, spec: LearnerSpec) -> None:
    """Switch on what the job asks for: activation checkpoints, compiled layers. Before `shard`."""
    if spec.activation_checkpointing:
        # The library's newer name, and what it was before; both compute again without re-entering autograd by default.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if spec.compile:
        for block in blocks(model):
            block.compile(dynamic=True)


@contextmanager
def recomputing(model: Any, spec: LearnerSpec) -> Iterator[None]:
    """Inside, layers drop their activations and compute them again for the gradient, if the job asks for it.

    The library does so only for layers in training mode. What is inside of a layer stays as it is: no dropout.
    """
    layers = blocks(model) if spec.activation_checkpointing else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
