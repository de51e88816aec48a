"""`/v1/keys`: API keys. The key itself is shown once, at its creation."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import select

from app.api.deps import AdminDep, ServicesDep
from app.api.idempotency import key_of
from app.api.paging import Cursor, Limit
from app.api.security import API_KEY, hash_key, new_key
from app.api.tables import table, text_response, wants_text
from app.protocol.base import Printable, Strict
from app.protocol.errors import Conflict, NotFound
from app.protocol.paging import decode, encode
from app.storage.models import ApiKey

router = APIRouter(prefix="/v1/keys", tags=["keys"])
COLUMNS = ("id", "name", "admin", "revoked")


class NewKey(Strict):
    """A key to be made."""

    name: Printable = Field(min_length=1, max_length=200)
    admin: bool = False


@router.post("", status_code=201)
async def create_key(body: NewKey, request: Request, who: AdminDep, svc: ServicesDep) -> dict[str, Any]:
    """Make a key; it is shown this once. With an Idempotency-Key it follows from that, so that it can be told again
    without being kept."""
    again = key_of(request)
    key = new_key(API_KEY) if again is None else API_KEY + svc.core.secrets.derive("api-key", f"{who.id}\0{again}")
    row = ApiKey(
        id="key_" + secrets.token_hex(6),
        name=body.name,
        key_hash=hash_key(key),
        admin=body.admin,
        created_at=svc.core.clock(),
    )
    async with svc.core.db.write() as session:
        before = (await session.scalars(select(ApiKey).where(ApiKey.key_hash == row.key_hash))).first()
        if before is None:
            session.add(row)
        elif (before.name, before.admin) != (body.name, body.admin):
            raise Conflict("this Idempotency-Key was used for another request; use a new one")
        elif before.revoked_at is not None:
            # The same secret would come again, and is refused everywhere.
            raise Conflict("the key that was made with this Idempotency-Key is revoked; use a new one for another key")
    row = before or row
    return {"id": row.id, "name": row.name, "admin": row.admin, "key": key}


@router.get("")
async def list_keys(
    request: Request, who: AdminDep, svc: ServicesDep, limit: Limit = 200, cursor: Cursor = None
) -> Response:
    """All keys, oldest first, without the keys. A cursor counts them: none ever goes away."""
    seen = max(0, decode(cursor) or 0)
    query = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id).offset(seen).limit(limit + 1)
    async with svc.core.db.read() as session:
        rows = list(await session.scalars(query))
    items = [{"id": r.id, "name": r.name, "admin": r.admin, "revoked": r.revoked_at is not None} for r in rows[:limit]]
    more = encode(seen + limit) if len(rows) > limit else None
    if wants_text(request):
        return text_response(table(items, COLUMNS), more)
    return JSONResponse({"items": items, "next_cursor": more})


@router.delete("/{key_id}", status_code=204)
async def revoke_key(key_id: str, who: AdminDep, svc: ServicesDep) -> None:
    """Revoke a key; twice is fine."""
    async with svc.core.db.write() as session:
        row = await session.get(ApiKey, key_id)
        if row is None:
            raise NotFound(f"there is no key {key_id}")
        row.revoked_at = row.revoked_at or svc.core.clock()
