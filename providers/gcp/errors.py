"""What a refusal of Compute Engine means.

Invariant: pure; Google's reason decides, then the HTTP status. A 404 says that an instance is gone only if it names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from providers.base import (
    AuthError,
    BadRequest,
    CreditError,
    InstanceNotFound,
    MalformedAnswer,
    NoCapacity,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimited,
    Transient,
)

WAIT_S = 30.0
"""Google's rate quotas are per minute and its answers name no time."""
_BY_REASON: Mapping[str, type[ProviderError]] = {
    "zone_resource_pool_exhausted": NoCapacity, "zone_resource_pool_exhausted_with_details": NoCapacity,
    "resource_pool_exhausted": NoCapacity, "resourcepoolexhausted": NoCapacity, "stockout": NoCapacity,
    "quotaexceeded": QuotaError, "quota_exceeded": QuotaError,
    "ratelimitexceeded": RateLimited, "userratelimitexceeded": RateLimited, "rate_limit_exceeded": RateLimited,
    "concurrent_operations_quota_exceeded": RateLimited,
    "autherror": AuthError, "forbidden": AuthError, "permission_denied": AuthError, "permissions_error": AuthError,
    "accessnotconfigured": AuthError, "service_disabled": AuthError, "required": BadRequest,
    "billingdisabled": CreditError, "billing_disabled": CreditError, "accountdisabled": CreditError,
    "backenderror": Transient, "internalerror": Transient, "internal_error": Transient,
    "resourcenotready": Transient, "resource_not_ready": Transient, "resourceinusebyanotherresource": Transient,
    "resource_operation_rate_exceeded": RateLimited,
    "unsupported_operation": OfferGone,
}  # fmt: skip
_STOCK = re.compile(
    r"does not have enough resources|resource pool exhausted|currently unavailable in the", re.IGNORECASE
)
_QUOTA = re.compile(r"quota '?[\w-]+'? exceeded|quota .*(?:gpus|cpus|preemptible)", re.IGNORECASE)
_BILLING = re.compile(r"billing (?:account|to be enabled)|requires billing", re.IGNORECASE)


def _kind(call: str, status: int | None, reason: str, message: str, name: str) -> type[ProviderError]:
    known = _BY_REASON.get(reason.replace(" ", "_").lower())
    # A missing billing account comes as a plain "forbidden" too.
    if known in (None, AuthError) and status == 403 and _BILLING.search(message):
        return CreditError
    if known is not None:
        return known
    if _STOCK.search(message):
        return NoCapacity
    if status == 429:
        return RateLimited
    if _QUOTA.search(message):
        return QuotaError
    if status == 404:
        if name and f"/instances/{name}'" in message:
            return InstanceNotFound
        return OfferGone if call == "create" else MalformedAnswer
    return _by_status(status)


def _by_status(status: int | None) -> type[ProviderError]:
    if status is None or status >= 500 or status == 408:
        return Transient
    if status in (401, 403):
        return AuthError
    return BadRequest if 400 <= status < 500 else MalformedAnswer


def classify(
    call: str, status: int | None, reason: str, message: str, *, name: str = "", provider: str = ""
) -> ProviderError:
    """The typed error of a call, or of an operation (`status` 400). `name` is the instance that was asked for."""
    kind = _kind(call, status, reason, message, name)
    where = f"HTTP {status}" if status is not None else "no answer"
    text = f"{call}: {message[:300]} ({reason or 'no reason'}, {where})"
    if kind is RateLimited:
        return RateLimited(text, wait_s=WAIT_S, provider=provider, raw=message)
    return kind(text, provider=provider, raw=message)
