"""POSTs with an Idempotency-Key: the first answer again, or 409 for another body.

Invariant: of two requests with the same key at most one does anything at a time, however long that takes; the other
waits for its answer. An answer is kept for a day; errors are not kept, so that a corrected request may use its key
again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from app.api.deps import Services
from app.protocol.errors import Conflict, Malformed
from app.storage.models import IdempotencyRecord

HEADER = "idempotency-key"
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
    done = await _turn(svc, key, owner, digest)
    try:
        before = await _answered(svc, key, owner, digest)
        if before is not None:
            return before
        status, body, location = await act()
        answer = _response(status, body, location)
        row = IdempotencyRecord(
            key=key, owner=owner, request_hash=digest, created_at=svc.core.clock(),
            status=status, body=bytes(answer.body).decode(), location=location,
        )  # fmt: skip
        async with svc.core.db.write() as session:
            await session.merge(row)
        return answer
    finally:
        del svc.answering[key, owner]
        done.set()


async def _turn(svc: Services, key: str, owner: str, digest: str) -> asyncio.Event:
    """Take the key for this request once nobody else answers one with it; what comes back is to be set when that is
    over. Nobody outside of this process can: there is one service on a database.

    Raises Conflict for another request with this key, and after WAIT_S.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while (busy := svc.answering.get((key, owner))) is not None:
                if busy[0] != digest:
                    raise _other()
                await busy[1].wait()
            done = asyncio.Event()
            svc.answering[key, owner] = digest, done
            return done
    raise Conflict("a request with this Idempotency-Key is being worked on; try again")


def _other() -> Conflict:
    return Conflict("this Idempotency-Key was used for another request; use a new one")


async def _answered(svc: Services, key: str, owner: str, digest: str) -> Response | None:
    """The answer that this key had. Raises Conflict if it was another request's."""
    async with svc.core.db.read() as session:
        row = await session.get(IdempotencyRecord, (key, owner))
    if row is None or row.status is None:
        # One without an answer is of a service before this one: it died over it, or wrote such rows before it acted.
        return None
    if row.request_hash != digest:
        raise _other()
    headers = {"Location": row.location} if row.location else {}
    return Response(row.body, row.status, headers, media_type="application/json")


def _response(status: int, body: dict[str, Any], location: str | None) -> Response:
    return JSONResponse(body, status, {"Location": location} if location else None)
