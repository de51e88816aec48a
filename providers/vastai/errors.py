"""What a refusal of vast.ai means.

Invariant: pure; the body's words decide, the HTTP status only where the body says nothing, because vast.ai answers
404 to a bad key and 410 both to a taken offer and to a retired call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from providers.base import (
    AuthError,
    BadRequest,
    BidTooLow,
    CreditError,
    EndpointDeprecated,
    InstanceNotFound,
    MalformedAnswer,
    NoCapacity,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimited,
    Transient,
)

from .limiter import INTERVALS_S

MAX_WAIT_S = 86_400.0
_THRESHOLD = re.compile(r"threshold\s*=\s*(\d+(?:\.\d+)?)")
_AUTH_WORDS = ("invalid user key", "session expired", "two factor", "two-factor")
_SECRET = re.compile(r'("(?:[a-z_]*api_key|token|password)"\s*:\s*")[^"]*(")', re.IGNORECASE)

_BY_CODE: Mapping[str, type[ProviderError]] = {
    "auth_error": AuthError, "deprecated_endpoint": EndpointDeprecated, "no_such_ask": OfferGone,
    "no_such_instance": InstanceNotFound, "insufficient_credit": CreditError, "no_credit": CreditError,
    "quota_exceeded": QuotaError, "no_capacity": NoCapacity, "invalid_price": BidTooLow, "invalid_args": BadRequest,
    "invalid_request": BadRequest, "no_ssh_key_for_vm": BadRequest,
}  # fmt: skip


def redact(text: str) -> str:
    """The text without keys, for error messages."""
    return _SECRET.sub(r"\1…\2", text)


def parse_object(text: str) -> dict[str, Any] | None:
    """A JSON object, or None when the text is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def malformed(message: str, answer: Any, provider: str) -> MalformedAnswer:
    """The error of a success that can't be used, with what was answered."""
    return MalformedAnswer(message, provider=provider, raw=redact(json.dumps(answer, default=str)))


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    try:
        return float(headers[name])
    except (KeyError, ValueError):
        return None


def rate_limited(call: str, text: str, headers: Mapping[str, str], now: float, provider: str) -> RateLimited:
    """How long to wait after a 429: the greatest of what the body, the headers and the published table say.

    `now` is epoch seconds, for the daily quota's reset time.
    """
    body = parse_object(text) or {}
    if body.get("error") == "search_quota_exceeded":
        reset = _seconds(headers, "x-ratelimit-reset")
        wait = MAX_WAIT_S - now % MAX_WAIT_S if reset is None else reset - now
        wait = min(MAX_WAIT_S, max(60.0, wait))
        message = "the daily search quota is used up"
        return RateLimited(message, wait_s=wait, daily=True, provider=provider, raw=redact(text))
    found = _THRESHOLD.search(text)
    said = float(found[1]) if found else None
    after = _seconds(headers, "retry-after")
    known = [wait for wait in (said, after) if wait is not None and wait >= 0]
    wait = min(MAX_WAIT_S, max(known)) if known else INTERVALS_S.get(call, 1.0)
    return RateLimited(f"{call} was asked too often", wait_s=wait, provider=provider, raw=redact(text))


def _kind(call: str, status: int, body: Mapping[str, Any]) -> type[ProviderError] | None:
    """The error that the body names; None when it names none."""
    code = str(body.get("error") or "")
    msg = str(body.get("msg") or body.get("detail") or "")
    low = msg.lower()
    if code == "auth_error" or any(word in low for word in _AUTH_WORDS):
        return AuthError
    if code == "deprecated_endpoint":
        return EndpointDeprecated
    if "no_such_ask" in msg or code == "no_such_ask":
        return OfferGone
    if code == "not_found":
        return OfferGone if call == "create" else InstanceNotFound
    if "lacks credit" in low or "insufficient credit" in low:
        return CreditError
    if code == "invalid_price" and call != "create":
        return BadRequest
    if code in _BY_CODE:
        return _BY_CODE[code]
    return BadRequest if code and 400 <= status < 500 else None


def classify(
    call: str, status: int, headers: Mapping[str, str], text: str, *, now: float, provider: str
) -> ProviderError:
    """The typed error of an answer that is not a success. `headers` must have lower-case names."""
    body = parse_object(text) or {}
    code = str(body.get("error") or "")
    if status == 429 or code in ("rate_limit_exceeded", "search_quota_exceeded") or "too frequent" in text[:500]:
        return rate_limited(call, text, headers, now, provider)
    message = f"{call}: {body.get('msg') or body.get('detail') or code or 'no readable reason'} (HTTP {status})"
    raw = redact(text)
    kind = _kind(call, status, body)
    if kind is None:
        kind = _by_status(status, bool(body))
    return kind(redact(message)[:300], provider=provider, raw=raw)


def _by_status(status: int, readable: bool) -> type[ProviderError]:
    if status in (401, 403):
        return AuthError
    if status == 402:
        return CreditError
    if status >= 500:
        return Transient
    if readable and 400 <= status < 500 and status not in (404, 410):
        return BadRequest
    # A 404 or 410 without a known reason may come from anywhere on the way: it proves nothing.
    return MalformedAnswer
