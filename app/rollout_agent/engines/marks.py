"""The SHA-256 of a snapshot's tensors, put together and typed as an engine keeps them.

Invariant: the bytes are those of the file, cast to the engine's type; one parameter at a time is in memory for each
thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from app.protocol.errors import IntegrityError
from app.rollout_agent.engines.checksums import Mark, sources
from app.snapshots.codec import TIED

THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""The engine needs the others."""


def marks_of(path: Path, engine: Collection[str], dtype: torch.dtype) -> dict[str, Mark]:
    """Parameter → mark, for the parameters that `engine` names and the tensors that none of them is made of.

    Reads the whole file. Raises IntegrityError.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file, ThreadPoolExecutor(THREADS) as pool:
            tied = json.loads((file.metadata() or {}).get(TIED, "{}"))
            wanted = sources(engine, list(file.keys()), tied)
            found = list(pool.map(lambda parts: _mark(file, parts, dtype), wanted.values()))
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(f"the payload {path.name} can't be read: {error}"[:500]) from error
    return dict(zip(wanted, found, strict=True))


def _mark(file: Any, parts: Sequence[str], dtype: torch.dtype) -> Mark:
    hasher, first, telling = hashlib.sha256(), None, False
    for part in parts:
        flat = file.get_tensor(part).to(dtype).contiguous().reshape(-1)
        if not flat.numel():
            continue
        first = flat[0] if first is None else first
        # The beginning mostly tells, and costs nothing.
        telling = telling or bool((flat[:4096] != first).any()) or bool((flat != first).any())
        hasher.update(flat.view(torch.uint8).numpy().data)
    return Mark(hasher.hexdigest(), telling)
