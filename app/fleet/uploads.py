"""Files that nodes put: where they may, and whether what lies there is what was promised.

Invariant: a node commits only keys that were made for it, and only bytes of the size and hash that it named.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable

import blake3

from app.fleet.core import Core
from app.protocol.errors import Forbidden, Refused, Unavailable
from app.protocol.work import CommitRequest, UploadSlot

log = logging.getLogger(__name__)

EXPIRES_S = 3600


def slot(core: Core, job_id: str, node_id: str, version: int) -> UploadSlot:
    """A new key of this node's, with a presigned PUT."""
    key = f"jobs/{job_id}/trajectories/{version}/{node_id}-{secrets.token_hex(8)}.parquet"
    put = core.objects.presign_put(key, EXPIRES_S, core.settings.max_upload_bytes)
    return UploadSlot(key=key, url=put.url, headers=put.headers)


def check_key(key: str, job_id: str, node_id: str) -> None:
    """Raises Refused unless the key was made for this node."""
    if not key.startswith(f"jobs/{job_id}/trajectories/") or f"/{node_id}-" not in key:
        raise Refused("foreign_key", "this key was not given to this node")


def fetch(core: Core, request: CommitRequest) -> bytes:
    """The bytes of a file that was put. Blocks. Raises Refused: `too_large`, `missing`, `truncated`, `hash`."""
    if request.size > core.settings.max_upload_bytes:
        raise Refused("too_large", f"at most {core.settings.max_upload_bytes} bytes are accepted")
    info = core.objects.head(request.key)
    if info is None:
        raise Refused("missing", "there is no such object in the store")
    if info.size != request.size:
        raise Refused("truncated", f"the object has {info.size} bytes, not {request.size}")
    data = core.objects.get(request.key)
    if blake3.blake3(data).hexdigest() != request.blake3:
        raise Refused("hash", "the object's hash is not the committed one")
    return data


async def remove(core: Core, keys: Iterable[str]) -> None:
    """Remove files, not inside a transaction. One that the store does not remove now is litter, and removed as such
    later: nobody's request fails for that."""
    for key in keys:
        try:
            await asyncio.to_thread(core.objects.delete, key)
        except (Unavailable, Forbidden) as error:
            log.warning("%s could not be removed: %s", key, error.detail)
