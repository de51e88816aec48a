"""The model's files, fetched once at the start: config and tokenizer; under an adapter its weights, too.

Invariant: a file in the model folder has the size and hash that the control service announced, wherever it came from;
what it did not announce is not there. A large one that was cut, or left by a process that ended, goes on at the byte
where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from app.protocol.errors import Forbidden, IntegrityError, NotFound, Unavailable
from app.protocol.node import AssetRef
from app.rollout_agent.client import NodeClient
from app.rollout_agent.hub import Hub

MAX_ASSET_BYTES = 256 * 1024 * 1024
WEIGHTS = (".safetensors", ".jsonl")
"""Files that may be of any size, and never are in memory as a whole."""
STORE_WAIT_S, STORE_LOOK_S = 900.0, 10.0
"""So long a file that the Hub did not give is waited for: the learner puts it into the store meanwhile."""
TELL_LOOKS = 6
"""After so many looks it is told again that the Hub failed: without that word nobody puts anything there."""

OnBytes = Callable[[int, int, str], None]
"""Told the bytes of all files that are there, those that there will be, and the file that comes now."""


def remove_others(folder: Path, assets: Sequence[AssetRef]) -> None:
    """Remove files that are none of these. A machine that had another job before has those of another model, and
    whoever loads a model takes what lies beside config.json for a part of it. Folders stay."""
    kept = {name for asset in assets for name in (asset.path, _part(folder / asset.path).name)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in kept and not path.is_dir():
            path.unlink(missing_ok=True)


async def fetch_assets(
    client: NodeClient,
    assets: Sequence[AssetRef],
    folder: Path,
    on_bytes: OnBytes = lambda *_: None,
    hub: Hub | None = None,
) -> None:
    """Download every asset into `folder`. Raises IntegrityError for a wrong size or hash, else what the client raises.

    Repeated once when the content is wrong: a proxy may have cut it. Weights that the Hugging Face Hub has come from
    `hub` first.
    """
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    total, done = sum(asset.size for asset in assets), 0
    for asset in assets:
        on_bytes(done, total, asset.path)
        if asset.path.endswith(WEIGHTS):
            await _fetch_weights(client, asset, folder / asset.path, _after(on_bytes, done, total, asset.path), hub)
        else:
            await _fetch_small(client, asset, folder / asset.path)
        done += asset.size
        on_bytes(done, total, asset.path)


def _after(on_bytes: OnBytes, done: int, total: int, name: str) -> Callable[[int], None]:
    return lambda size: on_bytes(done + size, total, name)


async def _fetch_small(client: NodeClient, asset: AssetRef, path: Path) -> None:
    if asset.size > MAX_ASSET_BYTES:
        raise IntegrityError(f"asset {asset.path} has {asset.size} bytes, at most {MAX_ASSET_BYTES} are taken")
    data = await client.download(asset.url, asset.size)
    if not _matches(asset, data):
        data = await client.download(asset.url, asset.size)
    if not _matches(asset, data):
        raise IntegrityError(f"asset {asset.path} does not have the size and hash that were announced")
    await asyncio.to_thread(path.write_bytes, data)


async def _fetch_weights(
    client: NodeClient, asset: AssetRef, path: Path, on_bytes: Callable[[int], None], hub: Hub | None
) -> None:
    part = _part(path)
    if await asyncio.to_thread(_is_it, path, asset):
        return
    if hub is None or not await hub.fetch(client, asset, part, _is_it, on_bytes):
        await _from_store(client, asset, part, on_bytes, hub)
    await asyncio.to_thread(part.replace, path)


async def _from_store(
    client: NodeClient, asset: AssetRef, part: Path, on_bytes: Callable[[int], None], hub: Hub | None
) -> None:
    for _ in range(2):
        await _once_there(client, asset, part, on_bytes, hub)
        if await asyncio.to_thread(_is_it, part, asset):
            return
        await asyncio.to_thread(part.unlink, missing_ok=True)
    raise IntegrityError(f"asset {asset.path} does not have the hash that was announced")


async def _once_there(
    client: NodeClient, asset: AssetRef, part: Path, on_bytes: Callable[[int], None], hub: Hub | None
) -> None:
    """Download from the store; what so far is only on the Hub is waited for."""
    looks = round(STORE_WAIT_S / STORE_LOOK_S) if asset.hub is not None else 0
    for looked in range(looks + 1):
        try:
            return await client.download_to(asset.url, part, asset.size, on_bytes)
        except (NotFound, Forbidden) as error:  # S3 forbids what is not there to whoever may not list
            if asset.hub is None:
                raise
            if looked == looks:
                raise Unavailable(
                    f"{asset.path} of {asset.hub.repo} came neither from the Hugging Face Hub nor, within "
                    f"{STORE_WAIT_S:.0f} s, from the object store ({error.detail}); the learner puts it there when told"
                    " that the Hub failed: its log says whether it could. Where the Hub can't be reached, name a mirror"
                    " by ECHO2_HF_ENDPOINT"
                ) from error
        if hub is not None and looked and looked % TELL_LOOKS == 0:
            await hub.tell()
        await client.pause(STORE_LOOK_S)


def _part(path: Path) -> Path:
    """Where a large file is while it comes."""
    return path.with_name(f".{path.name}.part")


def _is_it(path: Path, asset: AssetRef) -> bool:
    return path.is_file() and path.stat().st_size == asset.size and _digest(path) == asset.blake3


def _digest(path: Path) -> str:
    if path.stat().st_size == 0:
        return blake3(b"").hexdigest()
    return blake3(max_threads=1).update_mmap(path).hexdigest()


def _matches(asset: AssetRef, data: bytes) -> bool:
    return len(data) == asset.size and blake3(data).hexdigest() == asset.blake3
