"""A snapshot's payload before the engine sees it: checked as a whole, and in a form that the engine can read.

Invariant: what is handed on is a file whose every byte was held against the signed manifest, in full precision; the
engine was not touched when something here fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from app.protocol.errors import IntegrityError
from app.rollout_agent.engines.base import check_layout
from app.rollout_agent.engines.vllm_command import adapter_config
from app.snapshots.codec import decode
from app.snapshots.manifest import ADAPTER_ASSET, Manifest

LONGEST_HEADER = 256 * 1024 * 1024


def check_payload(payload: Path, manifest: Manifest, layout: Mapping[str, Sequence[int]]) -> None:
    """Tensor set against the model's, file header against the manifest, bytes against the signed hash.

    Raises IntegrityError.
    """
    check_layout(manifest, layout)
    try:
        size = payload.stat().st_size
        if size != manifest.payload_bytes:
            raise IntegrityError(f"snapshot v{manifest.version} has {size} bytes, {manifest.payload_bytes} were signed")
        found = _header(payload)
        digest = blake3(max_threads=blake3.AUTO).update_mmap(payload).hexdigest()
    except (OSError, ValueError) as error:
        raise IntegrityError(f"the payload of snapshot v{manifest.version} can't be read: {error}"[:500]) from error
    wanted = {entry.name: (entry.dtype, list(entry.shape), entry.begin, entry.end) for entry in manifest.tensors}
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if wrong:
        raise IntegrityError(f"the payload of snapshot v{manifest.version} is not what its manifest says: {wrong[:3]}")
    if digest != manifest.payload_blake3:
        raise IntegrityError(f"the payload of snapshot v{manifest.version} does not have the hash that was signed")


def _header(payload: Path) -> dict[str, tuple[str, list[int], int, int]]:
    """Name → type, shape, begin and end in the file. Raises ValueError."""
    with payload.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        fields = json.loads(file.read(length))
    try:
        return {
            name: (field["dtype"], list(field["shape"]), *(8 + length + at for at in field["data_offsets"]))
            for name, field in fields.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a safetensors header: {error!r}") from error


@asynccontextmanager
async def readable(payload: Path, manifest: Manifest, aside: Path, dtype: torch.dtype) -> AsyncIterator[Path]:
    """The payload itself, or what its quantised tensors stand for in a file at `aside`, gone afterwards.

    Raises IntegrityError.
    """
    if manifest.quantisation is None:
        yield payload
        return
    try:
        await asyncio.to_thread(write_restored, payload, aside, dtype)
        yield aside
    finally:
        await asyncio.to_thread(aside.unlink, missing_ok=True)


def write_restored(payload: Path, path: Path, dtype: torch.dtype) -> None:
    """A quantised payload in full precision, in the payload's order as far as safetensors keeps one."""
    try:
        with safe_open(payload, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
        state = decode(payload, dtype)
        tied = json.loads(metadata.get("tied", "{}"))
        save_file({n: t.contiguous() for n, t in state.items() if n not in tied}, path, metadata=metadata)
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(f"the restored payload can't be written: {error}"[:500]) from error


def write_adapter(folder: Path, model: Path, payload: Path) -> None:
    """A folder that vLLM opens as an adapter; the payload is linked into it where the file system can."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(adapter_config((model / ADAPTER_ASSET).read_bytes()))
    target = folder / "adapter_model.safetensors"
    try:
        os.link(payload, target)
    except OSError:
        shutil.copyfile(payload, target)
