"""Files that nodes put: where they may, and whether what lies there is what was promised.

Invariant: a node commits only keys that were made for it, and only bytes of the size and hash that it named. It has
never many more places of which nothing came than it has work: each is room in the store that somebody pays for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import blake3

from app.fleet.core import Core
from app.protocol.errors import Forbidden, NotFound, Refused, TooLarge, Unavailable
from app.protocol.work import CommitRequest, UploadSlot

log = logging.getLogger(__name__)

EXPIRES_S = 3600
SPARE = 64
"""Places beyond those for its work that a node may have had in MEMORY_S: an agent that cuts its samples by their size,
or works through an outage, asks for some that it doesn't use."""
EACH = 2
"""Places for each group that is leased: one comes with the work, one is asked for when it is ready."""
MEMORY_S = 600.0
MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class _Given:
    at: float
    items: frozenset[str]
    """What it came with; empty if it was asked for by itself."""


@dataclass(slots=True)
class Places:
    """Places that this process gave to nodes, and of which nothing has come yet. Times are the service's clock."""

    _nodes: dict[str, dict[str, _Given]] = field(default_factory=dict)

    def given(self, node_id: str, key: str, now: float, items: Iterable[str] = ()) -> None:
        """One more."""
        self._nodes.setdefault(node_id, {})[key] = _Given(now, frozenset(items))
        if len(self._nodes) > MOST_KNOWN:
            self._nodes = {name: open_ for name in list(self._nodes) if (open_ := self._open(name, now))}

    def used(self, node_id: str, key: str, items: Collection[str]) -> None:
        """A file was handed in: the place is used, and so are those that came with these items."""
        open_ = self._nodes.get(node_id, {})
        for name in [n for n, given in open_.items() if n == key or not given.items.isdisjoint(items)]:
            del open_[name]

    def unused(self, node_id: str, now: float) -> int:
        """How many of the last MEMORY_S there are."""
        return len(self._open(node_id, now))

    def _open(self, node_id: str, now: float) -> dict[str, _Given]:
        open_ = {key: given for key, given in self._nodes.get(node_id, {}).items() if now - given.at < MEMORY_S}
        if node_id in self._nodes:
            self._nodes[node_id] = open_
        return open_


def most_unused(held: int) -> int:
    """Places that a node which holds so many groups may have and not use. Pure."""
    return SPARE + EACH * held


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
    try:
        data = core.objects.get(request.key, request.size)
    except NotFound as error:
        raise Refused("missing", "there is no such object in the store") from error
    except TooLarge as error:
        raise Refused("truncated", f"the object has more than {request.size} bytes") from error
    if len(data) != request.size:
        raise Refused("truncated", f"the object has {len(data)} bytes, not {request.size}")
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
