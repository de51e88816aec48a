"""State dict ↔ payload: one safetensors file.

Invariant: `decode(encode_full(state))` has the names of `state` and, bit for bit, its tensors cast to bfloat16 (with
`quantise`: the chosen ones as `quantise.restored` makes them); tensors that were tied (same memory, same view) are
stored once and come back as one tensor object. Written by hand rather than by safetensors' own writer because that one
sorts by name: layer order lets a receiver use the first layers early. Scales stand before all else: so each tensor can
be used as soon as it is there, and four-byte numbers never lie at an odd place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from app.protocol.errors import BadInput, IntegrityError
from app.snapshots.manifest import DTYPE_BYTES, SCALE, TensorEntry
from app.snapshots.quantise import chosen, levels_of, restored_state, scale_of

TIED = "tied"
"""Key of the safetensors metadata that holds {second name: stored name} as JSON text."""
_Dtype = Literal["BF16", "F32", "I8"]


def encode_full(
    state: Mapping[str, torch.Tensor], path: Path, *, quantise: Literal["int8"] | None = None
) -> list[TensorEntry]:
    """Write a state dict as bf16 safetensors in its own order, fsync it, and say what lies where.

    `quantise`: matrices that `chosen` names are written in eight bits, their scales at the front. Raises BadInput for
    an empty state, a tensor that is not floating point, one without data (meta device), or one that can't be quantised.
    """
    stored, tied = _split_tied(state)
    scales = {n + SCALE: scale_of(n, t) for n, t in stored.items() if quantise and chosen(n, t)}
    if scales.keys() & state.keys():
        raise BadInput(f"{min(scales.keys() & state.keys())} is the name of a tensor and of scales")
    header, entries = _layout(scales, stored, tied)
    with path.open("wb") as file:
        file.write(header)
        for tensor in _written(scales, stored):
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return entries


def _written(scales: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors as they stand in the file; one at a time is cast or quantised."""
    yield from scales.values()
    for name, tensor in stored.items():
        scale = scales.get(name + SCALE)
        if scale is None:
            yield tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        else:
            yield levels_of(tensor, scale)


def decode(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The state dict in a payload file, on the CPU; tensors that were quantised come in `dtype`, others as stored.

    Raises IntegrityError if it is not a payload of ours.
    """
    state: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tied = _tied_names(file.metadata())
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                state[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise IntegrityError(f"{path} is not a snapshot payload: {error}") from error
    state = restored_state(state, dtype)
    for name, kept in tied.items():
        if kept not in state or name in state:
            raise IntegrityError(f"{path}: tensor {name!r} can't be tied to {kept!r}")
        state[name] = state[kept]
    return state


def _split_tied(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors to store, and further names of the same memory → the name that is stored."""
    if not state:
        raise BadInput("the state dict has no tensors")
    stored: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise BadInput(f"{name} is {tensor.dtype}; a snapshot holds floating-point tensors only")
        if tensor.is_meta:
            raise BadInput(f"{name} is on the meta device and has no data")
        view = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in seen:
            tied[name] = seen[view]
        else:
            seen[view] = name
            stored[name] = tensor
    return stored, tied


def _layout(
    scales: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> tuple[bytes, list[TensorEntry]]:
    """The header (8 bytes length, JSON padded to a multiple of 8) and the entries with offsets in the payload."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", TIED: json.dumps(tied)}}
    spans: list[tuple[str, _Dtype, list[int], int, int]] = []
    offset = 0
    for name, tensor in (*scales.items(), *stored.items()):
        if name == "__metadata__":
            raise BadInput("a tensor can't be called __metadata__ in safetensors")
        dtype: _Dtype = "F32" if name in scales else "I8" if name + SCALE in scales else "BF16"
        end = offset + DTYPE_BYTES[dtype] * tensor.numel()
        fields[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        spans.append((name, dtype, list(tensor.shape), offset, end))
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = [
        TensorEntry(name=name, dtype=dtype, shape=shape, begin=start + begin, end=start + end)
        for name, dtype, shape, begin, end in spans
    ]
    return len(text).to_bytes(8, "little") + text, entries


def _tied_names(metadata: Mapping[str, str] | None) -> dict[str, str]:
    try:
        tied = json.loads((metadata or {}).get(TIED, "{}"))
    except ValueError as error:
        raise IntegrityError(f"the payload's {TIED!r} metadata is not JSON") from error
    if not isinstance(tied, dict) or not all(isinstance(kept, str) for kept in tied.values()):
        raise IntegrityError(f"the payload's {TIED!r} metadata is not a map of names")
    return tied
