"""Model files from the Hugging Face Hub, so that they cost nobody's store any egress.

Invariant: only public files at a fixed commit are asked for, without any token; whoever fetches checks size and hash.
What the Hub did not give is told, again for as long as the store does not have it, and then it is not asked again.

A file is at `{endpoint}/{repo}/resolve/{commit}/{path}`. The Hub redirects large ones to a content network by addresses
that are signed for a while, and repositories that were renamed to their new name. Each try begins at the first address
therefore, with the range that is still missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import httpx

from app.protocol.errors import EchoError, Forbidden, NotFound, TooLarge, Unauthorized
from app.protocol.hub import HubRef
from app.protocol.node import AssetRef
from app.rollout_agent.client import NodeClient
from app.rollout_agent.redirects import Origin

log = logging.getLogger(__name__)

HUB = Origin("the Hugging Face Hub", httpx.Timeout(20.0, connect=5.0), retries=2, hops=5)
"""The store has the file, too, or will have: so it is left earlier than the store would be."""


class Hub:
    """What a node fetches from the Hub. `failed` is told the first file that did not come, and why."""

    def __init__(self, endpoint: str, failed: Callable[[str, str], Awaitable[None]], *, origin: Origin = HUB) -> None:
        self._endpoint = endpoint
        self._failed = failed
        self._origin = origin
        self._told: tuple[str, str] | None = None

    async def fetch(
        self,
        client: NodeClient,
        asset: AssetRef,
        part: Path,
        is_it: Callable[[Path, AssetRef], bool],
        on_bytes: Callable[[int], None],
    ) -> bool:
        """Download a file to `part`, going on with what is there of it. False: it did not come, which was told.

        What then is left at `part` is the beginning of the file as far as anybody knows.
        """
        if asset.hub is None or self._told is not None:
            return False
        wrong = await self._try(client, url_of(self._endpoint, asset.hub, asset.path), asset, part, is_it, on_bytes)
        if not wrong:
            return True
        self._told = (asset.path, f"{asset.hub.repo} at {asset.hub.revision}: {wrong}")
        log.warning("%s did not come from the Hugging Face Hub: %s", asset.path, wrong)
        await self.tell()
        return False

    async def tell(self) -> None:
        """Tell, or tell again, what did not come: the word is lost when the control service is away for a while."""
        if self._told is not None:
            await self._failed(*self._told)

    async def _try(
        self,
        client: NodeClient,
        url: str,
        asset: AssetRef,
        part: Path,
        is_it: Callable[[Path, AssetRef], bool],
        on_bytes: Callable[[int], None],
    ) -> str:
        """Why it did not come; empty if it did."""
        # What an earlier process left may have been wrong: then the Hub is not to blame.
        for _ in range(2 if await asyncio.to_thread(part.exists) else 1):
            try:
                await client.download_to(url, part, asset.size, on_bytes, self._origin)
            except TooLarge:
                await asyncio.to_thread(part.unlink, missing_ok=True)
                continue
            except EchoError as error:
                return explain(error)
            if await asyncio.to_thread(is_it, part, asset):
                return ""
            await asyncio.to_thread(part.unlink, missing_ok=True)
        return "it gave other bytes than those that were announced"


def url_of(endpoint: str, ref: HubRef, path: str) -> str:
    """Where a file is."""
    return f"{endpoint.rstrip('/')}/{ref.repo}/resolve/{ref.revision}/{quote(path)}"


def explain(error: EchoError) -> str:
    """Why the Hub did not give a file, in words."""
    if isinstance(error, Unauthorized | Forbidden):
        return f"it is not public there ({error.detail})"
    if isinstance(error, NotFound):
        return f"no such file there ({error.detail})"
    return error.detail
