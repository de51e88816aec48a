"""`/v1/hooks/spot-price`: marketplaces tell prices, signed as Standard Webhooks.

Invariant: an id is acted on once, however often it is sent; a body that can't be trusted changes nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, Field, ValidationError

from app.api.deps import ServicesDep
from app.api.problems import json_pointer, what_to_change
from app.api.security import verify_webhook
from app.protocol.base import Strict, micros
from app.protocol.errors import BadInput, FieldError, Unavailable
from app.protocol.job_patch import SpotSelector
from app.storage.models import SpotPrice, WebhookId

router = APIRouter(prefix="/v1/hooks", tags=["hooks"])
MAX_AHEAD = timedelta(days=1)


class SpotPriceHook(Strict):
    """The message: a price per hour for all machines of a provider that the selector means."""

    provider: str = Field(max_length=64)
    selector: SpotSelector
    price_per_hour: Annotated[Decimal, Field(gt=0, le=100_000)]
    effective_at: AwareDatetime


@router.post("/spot-price", status_code=202)
async def spot_price(request: Request, svc: ServicesDep) -> Response:
    """Take a price and re-rank at once."""
    secret = svc.core.settings.webhook_secret
    if secret is None:
        raise Unavailable("this service takes no webhooks: ECHO2_WEBHOOK_SECRET is not set")
    now = svc.core.clock()
    body = await request.body()
    message_id = verify_webhook(secret.get_secret_value(), request.headers, body, datetime.fromtimestamp(now, UTC))
    hook = _parse(body, now)
    if hook.provider not in svc.core.providers:
        known = ", ".join(sorted(svc.core.providers))
        raise BadInput(f"provider {hook.provider!r} is not one of {known}", errors=[FieldError("/provider", known)])
    row = SpotPrice(
        provider=hook.provider,
        selector=hook.selector.model_dump(exclude_none=True),
        micros_h=micros(hook.price_per_hour),
        effective_at=hook.effective_at.timestamp(),
        received_at=now,
    )
    async with svc.core.db.write() as session:
        if await session.get(WebhookId, message_id) is not None:
            return JSONResponse({"accepted": True, "replay": True}, 202)
        session.add(WebhookId(id=message_id, received_at=now))
        session.add(row)
    svc.controller.leases.spawn(svc.controller.price_changed(hook.provider, row))
    return JSONResponse({"accepted": True, "replay": False}, 202)


def _parse(body: bytes, now: float) -> SpotPriceHook:
    try:
        hook = SpotPriceHook.model_validate_json(body)
    except ValidationError as error:
        fields = [FieldError(json_pointer(e["loc"]), what_to_change(e)) for e in error.errors()]
        first = f"{fields[0].pointer or 'body'}: {fields[0].detail}"
        raise BadInput(f"the spot price can't be read: {first}", errors=fields) from error
    if hook.effective_at > datetime.fromtimestamp(now, UTC) + MAX_AHEAD:
        raise BadInput(
            "effective_at is more than a day ahead", errors=[FieldError("/effective_at", "not so far ahead")]
        )
    return hook
