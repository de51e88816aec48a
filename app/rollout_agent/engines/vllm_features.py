"""What a vLLM of a given version can do, and what ours needs of it. Pure.

Invariant: a version that lacks something we need is refused by name before its process is started, and one that was
never tested with these interfaces is refused or used with a warning, never taken for a tested one. Tested: 0.32.0.

| what we use | since |
|---|---|
| `/pause?mode=keep`, `/resume` | 0.17 |
| `/update_weight_version`, spans in answers | 0.32 |
| `/inference/v1/generate` behind `--enable-scale-out` | 0.32 |
| `/abort_requests` for all that runs | 0.32 |
| layer-wise reload inside the worker | 0.32 |
| `/weight_checker`, where there is one | 0.32 |
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from app.protocol.errors import BadInput

NEEDED: tuple[tuple[str, tuple[int, int]], ...] = (
    ("pausing with requests kept", (0, 17)),
    ("spans of weight versions", (0, 32)),
    ("the token endpoint (--enable-scale-out)", (0, 32)),
    ("aborting whatever runs", (0, 32)),
    ("the layer-wise reload in the worker", (0, 32)),
)
TESTED: frozenset[tuple[int, int]] = frozenset({(0, 32)})
ROUTES: tuple[str, ...] = (
    "/inference/v1/generate",
    "/pause",
    "/resume",
    "/abort_requests",
    "/collective_rpc",
    "/update_weight_version",
)
"""Paths that must be there once the server runs, whatever its version is called."""
CHECKSUM_ROUTE = "/weight_checker"
"""SHA-256 of each parameter. In 0.32; used where it is there, and nothing needs it."""
LORA_ROUTES: tuple[str, ...] = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of one version. `tested` False: it has what we need by its number, and nobody has tried it."""

    version: str
    tested: bool


def features(version: str) -> Features:
    """What a version has. Raises BadInput for one that lacks something, or whose number can't be read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise BadInput(f"vLLM calls itself {version[:40]!r}: no version number; install vllm 0.32.0")
    number = (int(found[1]), int(found[2]))
    lacks = [name for name, since in NEEDED if number < since]
    if lacks:
        raise BadInput(f"vLLM {version} lacks {'; '.join(lacks)}; install vllm 0.32.0 (tested)")
    return Features(version, tested=number in TESTED)


def missing_routes(paths: Collection[str], *, lora: bool) -> list[str]:
    """Paths that we need and a running server doesn't have."""
    return [route for route in (*ROUTES, *(LORA_ROUTES if lora else ())) if route not in paths]
