"""POSTs with an Idempotency-Key: the first answer again, or 409 for another body.

Invariant: of two requests with the same key at most one does anything at a time; the other waits for its answer. An
answer is kept for a day; errors are not kept, so that a corrected request may use its key again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from app.api.deps import Services
from app.protocol.errors import Conflict, Malformed
from app.storage.models import IdempotencyRecord

HEADER = "idempotency-key"
STALE_S = 60.0
"""A request without an answer after this long died with its process; the next one may take its place."""
WAIT_S = 20.0
"""So long a request waits for the answer to an earlier one with its key."""


def key_of(request: Request) -> str | None:
    """The key, if one was sent. Raises Malformed for an unusable one."""
    key = request.headers.get(HEADER)
    if key is not None and not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):
        raise Malformed("Idempotency-Key must be 1…255 printable ASCII characters")
    return key


async def once(
    request: Request, svc: Services, owner: str, act: Callable[[], Awaitable[tuple[int, dict[str, Any], str | None]]]
) -> Response:
    """Do `act` (→ status, body, location) unless this key was answered before."""
    key = key_of(request)
    if key is None:
        status, body, location = await act()
        return _response(status, body, location)
    content = request.method.encode() + b"\0" + request.url.path.encode() + b"\0" + await request.body()
    digest = hashlib.sha256(content).hexdigest()
    before = await _turn(svc, key, owner, digest)
    if before is not None:
        return before
    done = False
    try:
        status, body, location = await act()
        done = True
    finally:
        if not done:
            await _forget(svc, key, owner)
            svc.core.signals.notify(_signal(key, owner))
    answer = _response(status, body, location)
    async with svc.core.db.write() as session:
        row = await session.get_one(IdempotencyRecord, (key, owner))
        row.status, row.body, row.location = status, bytes(answer.body).decode(), location
    svc.core.signals.notify(_signal(key, owner))
    return answer


def _signal(key: str, owner: str) -> str:
    return f"once:{owner}:{key}"


async def _turn(svc: Services, key: str, owner: str, digest: str) -> Response | None:
    """None when it is this request's turn, or the answer that its key had; waits for one that is being worked on.

    Raises Conflict for another request with this key, and after WAIT_S.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + WAIT_S
    while True:
        news = svc.core.signals.subscribe(_signal(key, owner))
        try:
            return await _claim(svc, key, owner, digest)
        except _Busy:
            left = until - loop.time()
            if left <= 0:
                raise
        await svc.core.signals.wait(news, left)


class _Busy(Conflict):
    """The request that has the key is being worked on."""


async def _claim(svc: Services, key: str, owner: str, digest: str) -> Response | None:
    """Take the key for this request, or give the answer that it had. Raises Conflict."""
    now = svc.core.clock()
    async with svc.core.db.write() as session:
        row = await session.get(IdempotencyRecord, (key, owner))
        if row is None:
            session.add(IdempotencyRecord(key=key, owner=owner, request_hash=digest, created_at=now))
            return None
        if row.request_hash != digest:
            raise Conflict("this Idempotency-Key was used for another request; use a new one")
        if row.status is not None:
            headers = {"Location": row.location} if row.location else {}
            return Response(row.body, row.status, headers, media_type="application/json")
        if now - row.created_at < STALE_S:
            raise _Busy("a request with this Idempotency-Key is being worked on; try again")
        row.created_at = now
    return None


async def _forget(svc: Services, key: str, owner: str) -> None:
    async with svc.core.db.write() as session:
        row = await session.get(IdempotencyRecord, (key, owner))
        if row is not None:
            await session.delete(row)


def _response(status: int, body: dict[str, Any], location: str | None) -> Response:
    return JSONResponse(body, status, {"Location": location} if location else None)
