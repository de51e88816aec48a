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
from pydantic_core import ErrorDetails, from_json

from app.api.deps import ServicesDep
from app.api.problems import json_pointer, what_to_change, within
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
        known = "must be one of " + ", ".join(sorted(svc.core.providers))
        raise BadInput(f"provider {known}; it is {hook.provider!r}", errors=[FieldError("/provider", known)])
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
        fields = [FieldError(pointer, what_to_change(e)) for e, pointer in _places(error, body)]
        first = f"{fields[0].pointer or 'body'}: {fields[0].detail}"
        raise BadInput(f"the spot price can't be read: {first}", errors=fields) from error
    if hook.effective_at > datetime.fromtimestamp(now, UTC) + MAX_AHEAD:
        raise BadInput(
            "effective_at is more than a day ahead", errors=[FieldError("/effective_at", "not so far ahead")]
        )
    if micros(hook.price_per_hour) == 0:
        # As a floor it would draw every bid down with it.
        detail = "must be at least 0.000001, a micro-dollar"
        raise BadInput(f"price_per_hour {detail}", errors=[FieldError("/price_per_hour", detail)])
    return hook


def _places(error: ValidationError, body: bytes) -> list[tuple[ErrorDetails, str]]:
    """Each error with its place in the body, which pydantic could read unless that is the error."""
    found = error.errors()
    document = None if found[0]["type"] == "json_invalid" else from_json(body)
    return [(e, json_pointer(within(document, e["loc"], missing=e["type"] == "missing"))) for e in found]
