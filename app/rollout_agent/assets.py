"""The model's files, fetched once at the start: config and tokenizer; under an adapter its weights, too.

Invariant: a file in the model folder has the size and hash that the control service announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from app.protocol.errors import IntegrityError
from app.protocol.node import AssetRef
from app.rollout_agent.client import NodeClient

MAX_ASSET_BYTES = 256 * 1024 * 1024
WEIGHTS = ".safetensors"
"""Files that may be of any size, and never are in memory as a whole."""


async def fetch_assets(client: NodeClient, assets: Sequence[AssetRef], folder: Path) -> None:
    """Download every asset into `folder`. Raises IntegrityError for a wrong size or hash, else what the client raises.

    Repeated once when the content is wrong: a proxy may have cut it.
    """
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    for asset in assets:
        if asset.path.endswith(WEIGHTS):
            await _fetch_weights(client, asset, folder / asset.path)
            continue
        if asset.size > MAX_ASSET_BYTES:
            raise IntegrityError(f"asset {asset.path} has {asset.size} bytes, at most {MAX_ASSET_BYTES} are taken")
        data = await client.download(asset.url, asset.size)
        if not _matches(asset, data):
            data = await client.download(asset.url, asset.size)
        if not _matches(asset, data):
            raise IntegrityError(f"asset {asset.path} does not have the size and hash that were announced")
        await asyncio.to_thread((folder / asset.path).write_bytes, data)


async def _fetch_weights(client: NodeClient, asset: AssetRef, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    for _ in range(2):
        await client.download_to(asset.url, part, asset.size)
        if await asyncio.to_thread(_digest, part) == asset.blake3:
            await asyncio.to_thread(part.replace, path)
            return
    raise IntegrityError(f"asset {asset.path} does not have the hash that was announced")


def _digest(path: Path) -> str:
    if path.stat().st_size == 0:
        return blake3(b"").hexdigest()
    return blake3(max_threads=1).update_mmap(path).hexdigest()


def _matches(asset: AssetRef, data: bytes) -> bool:
    return len(data) == asset.size and blake3(data).hexdigest() == asset.blake3
