"""`/v1/objects`: presigned URLs of the folder store. With S3 the store answers itself and these routes do not exist.

Invariant: only what was signed is served: this key, this method, until then, at most so many bytes.
"""

from __future__ import annotations

import asyncio
import shutil
from tempfile import SpooledTemporaryFile
from typing import IO

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from app.api.deps import ServicesDep
from app.protocol.errors import NotFound, TooLarge
from app.storage.signing import check_signature
from app.storage.stores import FolderStore

router = APIRouter(prefix="/v1/objects", tags=["objects"])
IN_MEMORY = 1 << 20
"""More of one upload than this is never in memory: many nodes put at the same time."""


def _store(svc: ServicesDep) -> FolderStore:
    if not isinstance(svc.core.objects, FolderStore):
        raise NotFound("objects are served by the object store itself")
    return svc.core.objects


@router.get("/{key:path}")
async def get_object(key: str, request: Request, svc: ServicesDep) -> Response:
    """An object, by a URL that was signed for GET."""
    check_signature(svc.core.secrets.signing_key(), key, request.query_params, method="GET", now=svc.core.clock())
    return FileResponse(_store(svc).path(key), media_type="application/octet-stream")


@router.put("/{key:path}")
async def put_object(key: str, request: Request, svc: ServicesDep) -> Response:
    """Store an object, by a URL that was signed for PUT."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else None
    grant = check_signature(
        svc.core.secrets.signing_key(), key, request.query_params, method="PUT", now=svc.core.clock(), size=size
    )
    store = _store(svc)
    with SpooledTemporaryFile(max_size=IN_MEMORY) as spool:
        async for block in request.stream():
            if spool.tell() + len(block) <= IN_MEMORY:
                spool.write(block)
            else:
                await asyncio.to_thread(spool.write, block)
            if grant.max_bytes is not None and spool.tell() > grant.max_bytes:
                raise TooLarge(f"more than the {grant.max_bytes} bytes that this URL allows")
        await asyncio.to_thread(_keep, store, key, spool)
    return Response(status_code=200)


def _keep(store: FolderStore, key: str, spool: IO[bytes]) -> None:
    spool.seek(0)
    with store.writer(key) as file:
        shutil.copyfileobj(spool, file)
