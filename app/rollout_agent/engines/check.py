"""Whether the weights in an engine are those that the learner signed.

Invariant: the answer comes from the tensors in force, read back bit by bit, and not from the file that they were read
from. A type that can't give the stored bits back, and a quantised tensor, is held element for element against what the
bytes in the file make in that type, and it is those bytes that are hashed: to quantise what is loaded once more would
forgive every error of less than half a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from app.rollout_agent.engines.base import STORED_DTYPES, Tainted
from app.snapshots.manifest import SCALE, Manifest, TensorEntry
from app.snapshots.quantise import restored


def check_loaded(payload: Path, manifest: Manifest, weights: Mapping[str, torch.Tensor]) -> None:
    """Hash the payload as the loaded weights give it, tensor by tensor, and hold it against the signed hash.

    What lies between the tensors (the header) is taken from the file. Raises Tainted when it differs.
    """
    hasher, at = blake3(), 0
    own = {entry.name for entry in manifest.weights}
    scales: dict[str, torch.Tensor] = {}
    with payload.open("rb") as file:
        for entry in manifest.tensors:
            hasher.update(file.read(entry.begin - at))
            stored = file.read(entry.end - entry.begin)
            if entry.name in own:
                hasher.update(_loaded(weights[entry.name], entry, stored, scales.get(entry.name + SCALE)))
            else:
                scales[entry.name] = torch.frombuffer(bytearray(stored), dtype=torch.float32)
                hasher.update(stored)
            at = entry.end
        hasher.update(file.read())
    if hasher.hexdigest() != manifest.payload_blake3:
        raise Tainted(
            f"the weights that were loaded for v{manifest.version} don't have the hash that the learner signed"
        )


def _loaded(tensor: torch.Tensor, entry: TensorEntry, stored: bytes, scale: torch.Tensor | None) -> Any:
    """The bytes that a loaded tensor stands for: `stored`, if it is what they make; else others."""
    bits = _bits(tensor, entry)
    if bits is None:  # the engine holds it in a type that can't give the bits back
        return stored if _same_after_cast(tensor, entry, stored, scale) else b""
    return bits


def _bits(tensor: torch.Tensor, entry: TensorEntry) -> Any | None:
    """The tensor's bytes in the stored type; None when the loaded type isn't exact for it."""
    here, stored = tensor.detach().cpu().contiguous().reshape(-1), STORED_DTYPES[entry.dtype]
    if here.dtype == stored:
        return here.view(torch.uint8).numpy().data
    if here.dtype != torch.float32 or stored != torch.bfloat16:
        return None
    # bfloat16 is the upper half of float32; anything in the lower half was never published.
    halves = here.view(torch.int16).reshape(-1, 2)
    if halves[:, 0].any():
        return b""
    return halves[:, 1].contiguous().view(torch.uint8).numpy().data


def _same_after_cast(tensor: torch.Tensor, entry: TensorEntry, stored: bytes, scale: torch.Tensor | None) -> bool:
    """Whether a tensor is what was stored, restored if it has scales, and cast to its own type."""
    if not tensor.numel():
        return True
    raw = torch.frombuffer(bytearray(stored), dtype=STORED_DTYPES[entry.dtype]).reshape(entry.shape)
    expected = raw.to(tensor.dtype) if scale is None else restored(raw, scale, tensor.dtype)
    return torch.equal(tensor.detach().cpu(), expected)
