"""The model's small files: config and tokenizer, fetched once at the start.

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


async def fetch_assets(client: NodeClient, assets: Sequence[AssetRef], folder: Path) -> None:
    """Download every asset into `folder`. Raises IntegrityError for a wrong size or hash, else what the client raises.

    Repeated once when the content is wrong: a proxy may have cut it.
    """
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    for asset in assets:
        if asset.size > MAX_ASSET_BYTES:
            raise IntegrityError(f"asset {asset.path} has {asset.size} bytes, at most {MAX_ASSET_BYTES} are taken")
        data = await client.download(asset.url, asset.size)
        if not _matches(asset, data):
            data = await client.download(asset.url, asset.size)
        if not _matches(asset, data):
            raise IntegrityError(f"asset {asset.path} does not have the size and hash that were announced")
        await asyncio.to_thread((folder / asset.path).write_bytes, data)


def _matches(asset: AssetRef, data: bytes) -> bool:
    return len(data) == asset.size and blake3(data).hexdigest() == asset.blake3
