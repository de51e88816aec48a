"""Whether the weights in an engine are those that the learner signed.

Invariant: the answer comes from the tensors in force, read back bit by bit, and not from the file that they were read
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from app.rollout_agent.engines.base import STORED_DTYPES, Tainted
from app.snapshots.manifest import Manifest, TensorEntry


def check_loaded(payload: Path, manifest: Manifest, weights: Mapping[str, torch.Tensor]) -> None:
    """Hash the payload as the loaded weights give it, tensor by tensor, and hold it against the signed hash.

    What lies between the tensors (the header) is taken from the file. Raises Tainted when it differs.
    """
    hasher, at = blake3(), 0
    with payload.open("rb") as file:
        for entry in manifest.tensors:
            hasher.update(file.read(entry.begin - at))
            stored = file.read(entry.end - entry.begin)
            bits = _bits(weights[entry.name], entry)
            if bits is None:  # the engine holds it in a type that can't give the bits back
                bits = stored if _same_after_cast(weights[entry.name], entry, stored) else b""
            hasher.update(bits)
            at = entry.end
        hasher.update(file.read())
    if hasher.hexdigest() != manifest.payload_blake3:
        raise Tainted(
            f"the weights that were loaded for v{manifest.version} don't have the hash that the learner signed"
        )


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


def _same_after_cast(tensor: torch.Tensor, entry: TensorEntry, stored: bytes) -> bool:
    """Whether a tensor is what was stored, cast to its own type."""
    if not tensor.numel():
        return True
    expected = torch.frombuffer(bytearray(stored), dtype=STORED_DTYPES[entry.dtype]).to(tensor.dtype)
    return torch.equal(tensor.detach().cpu().reshape(-1), expected)
