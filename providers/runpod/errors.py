"""What a refusal of RunPod means.

Invariant: pure; a refusal counts as RunPod's only if its body is a problem document (RFC 9457). Any other 4xx may come
from anywhere on the way and proves nothing, a 404 least of all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from providers.base import (
    AuthError,
    BadRequest,
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

DEFAULT_WAIT_S = 10.0
MAX_WAIT_S = 86_400.0
# RunPod gives capacity no code of its own: a 400 is told apart by its sentence alone.
_CAPACITY = re.compile(
    r"no longer any|no (?:more )?(?:instances|machines|gpus|capacity|resources)|capacity|out of stock"
    r"|could not be placed|not enough|insufficient (?:gpu|resources)|unavailable|not available"
    r"|does not have the resources|try again later",
    re.IGNORECASE,
)
_CREDIT = re.compile(r"balance|insufficient funds|credit|spend limit", re.IGNORECASE)
_POOL = re.compile(r"\b(?:pool|gpus?|cloud|data ?cent(?:er|re)|tier)\b", re.IGNORECASE)
_ROUTE = re.compile(r"\b(?:route|path|endpoint|method|page|url)\b", re.IGNORECASE)
_WINDOW = re.compile(r'"(\w+)"\s*;\s*r=(\d+)\s*;\s*t=(\d+)')
_SECRET = re.compile(r"(Bearer\s+|rpa_)[\w.~+/-]+=*", re.IGNORECASE)
# A pod's environment comes back with it, and a node's join token is in there.
_ENV = re.compile(r"""(["']env["']\s*:\s*\{)[^}]*""")


def redact(text: str) -> str:
    """The text without keys and environments."""
    return _ENV.sub(r"\1…", _SECRET.sub(r"\1…", text))


def parse_object(text: str) -> dict[str, Any] | None:
    """A JSON object, or None when the text is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def problem(text: str) -> dict[str, Any] | None:
    """RunPod's own problem document; None when the text is anything else."""
    body = parse_object(text)
    return body if body is not None and isinstance(body.get("detail") or body.get("title"), str) else None


def _sentence(body: Mapping[str, Any]) -> str:
    told = [str(body.get("detail") or body.get("title") or "")]
    told += [str(one) for one in body.get("errors") or [] if isinstance(body.get("errors"), list)]
    return "; ".join(part for part in told if part)


def wait_of(headers: Mapping[str, str]) -> float:
    """Seconds to wait after a 429: `Retry-After`, else the longest window of `RateLimit` that is used up."""
    try:
        wait = float(headers["retry-after"])
    except (KeyError, ValueError):
        used_up = [float(t) for _, left, t in _WINDOW.findall(headers.get("ratelimit", "")) if left == "0"]
        wait = max(used_up, default=DEFAULT_WAIT_S)
    return min(MAX_WAIT_S, wait) if wait >= 0 else DEFAULT_WAIT_S


def _bad_request(said: str) -> type[ProviderError]:
    if _CREDIT.search(said):
        return CreditError
    return NoCapacity if _CAPACITY.search(said) else BadRequest


def _kind(call: str, status: int, said: str) -> type[ProviderError]:
    if status == 401:
        return AuthError
    if status == 402:
        return CreditError
    if status == 403:
        # To a create it may also mean that this account has no access to this one kind of machine.
        return QuotaError if call == "create" and _POOL.search(said) else AuthError
    if status == 404 and call == "create":
        return OfferGone
    if status == 404:
        return MalformedAnswer if _ROUTE.search(said) else InstanceNotFound
    if status == 410:
        return EndpointDeprecated
    if status == 400 and call == "create":
        return _bad_request(said)
    return BadRequest


def classify(call: str, status: int, headers: Mapping[str, str], text: str, provider: str) -> ProviderError:
    """The typed error of an answer that is not a success. `headers` must have lower-case names."""
    raw = redact(text)
    body = problem(text)
    said = redact(_sentence(body))[:300] if body is not None else "no readable reason"
    message = f"{call}: {said} (HTTP {status})"
    if status == 429:
        daily = '"day";r=0' in headers.get("ratelimit", "").replace(" ", "")
        return RateLimited(message, wait_s=wait_of(headers), daily=daily, provider=provider, raw=raw)
    if status >= 500:
        return Transient(message, provider=provider, raw=raw)
    if body is None:
        # A gateway's bare 401 is as good as RunPod's: nothing was let through.
        kind: type[ProviderError] = AuthError if status == 401 else MalformedAnswer
        return kind(message, provider=provider, raw=raw)
    return _kind(call, status, said)(message, provider=provider, raw=raw)
